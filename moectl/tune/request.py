"""The request for a search for policies: options as typed, validated before anything runs."""

import re
from dataclasses import dataclass
from math import inf

from artifacts.errors import BadUsage
from artifacts.hardware.machines import machine
from artifacts.quantisation.replicas import check_base
from artifacts.shape import FULL_BITS, Shape
from artifacts.traces.clients import Clients, clients_of
from profilers.workers.choose import LOCAL, check_executor
from runtime.control import sizes
from runtime.policies.presets import presets
from runtime.session.settings import check_experts

_ANY = Shape(1, 1, 1, 1)
_NAME = re.compile(r"[a-z][a-z0-9-]*")
LOSSLESS = "-lossless"  # suffix of the name of the lossless pick


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """Validated settings of a search. Raises BadUsage for an invalid value.

    `minutes` limits the whole, unless `candidates` is given. `data` is the text for a trace if the
    store has none, `held_out` the text for verification, `check_data` text of another kind for a
    check of the picks. `max_loss` is a share of perplexity. With `clients` picks are the fastest
    simulated for that many requests at a time. Live runs, of one request at a time, then only say
    whether the picks run and what they lose.
    """

    budget: str = "25%"
    scaled_to: str | None = None
    link: str = "auto"
    max_loss: float = 0.005
    minutes: float = 3.0
    candidates: int | None = None
    data: str = "builtin"
    held_out: str = "builtin:held-out"
    check_data: str | None = None
    tokens: int = 2048
    length: int = 128
    rounds: int = 5
    base: int = FULL_BITS
    experts: str = "exact"
    name: str = "tuned"
    clients: int | None = None
    jobs: int | None = None
    executor: str = LOCAL
    seed: int = 0

    def __post_init__(self) -> None:
        sizes.budget_nbytes(self.budget, _ANY)
        if self.scaled_to:
            machine(self.scaled_to)
            if self.link != "auto":
                raise BadUsage("--scaled-to sets the link itself: leave out --link")
        check_base(self.base)
        clients_of(self.clients)
        check_experts(self.experts)
        check_executor(self.executor)
        if self.minutes <= 0:
            raise BadUsage(f"--minutes is a time above 0, not {self.minutes:g}")
        if not _NAME.fullmatch(self.name):
            raise BadUsage(
                f"--name {self.name!r} is no name: small letters, digits and -, a letter first"
            )
        if self.name in presets() or f"{self.name}{LOSSLESS}" in presets():
            raise BadUsage(f"--name {self.name} is a preset of moectl: give another name")

    @property
    def served(self) -> Clients | None:
        """The clients whose requests are served together."""
        return clients_of(self.clients, seed=self.seed)

    @property
    def limit_s(self) -> float:
        """Seconds for all of it; without limit where the number of candidates is given."""
        return inf if self.candidates is not None else 60 * self.minutes

    @property
    def machine_name(self) -> str:
        where = self.scaled_to or ("here" if self.link == "auto" else f"here, {self.link}")
        return where if self.base == FULL_BITS else f"{where}, experts of {self.base} bits"


def share(text: str) -> float:
    """Parse `0.5%` or `0.005`. Raises BadUsage unless the share is in [0, 1)."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise BadUsage(
            f"--max-loss {text!r} is no share of perplexity: give 0.5%, 1.5% or 0 for none"
        )
    return value
