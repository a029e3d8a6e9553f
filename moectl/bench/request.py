"""The request for a bench: presets, budgets and links as typed, validated before anything runs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage
from artifacts.formats.dense import check_dense
from artifacts.hardware.machines import HERE, machine
from artifacts.modelshapes.kv_cache import kv_bits
from artifacts.quantisation.replicas import check_base
from artifacts.shape import FULL_BITS, Shape
from artifacts.traces.clients import Clients, clients_of
from moectl.bench.options import BenchOptions
from moectl.shared.names import names_in
from profilers.compare.bench import BenchSetting
from profilers.compare.peers import EVERYTHING, PEERS
from profilers.compare.tasks import check_tasks
from profilers.workers.choose import LOCAL, check_executor
from runtime.control import sizes
from runtime.drafters.base import NONE, Draft
from runtime.policies.presets import Preset, preset, presets
from runtime.session.presets import find_presets
from runtime.session.settings import EXACT, check_activations, check_experts

ALL = "all"
AUTO = "auto"
ORACLE = "oracle"
FULL = "full"
PLAIN = "on-demand"
FIXED = (FULL, "uniform-bits", PLAIN, "near")
DEFAULT_MACHINE = "a100-pcie4"
_ANY = Shape(1, 1, 1, 1)
_LIVE_LINKS = (AUTO, "disk", "direct", "cuda")


@dataclass(frozen=True, slots=True)
class BenchRequest(BenchOptions):
    """The options of a bench, validated; lists are separated by commas. Raises BadUsage for an
    invalid value.

    `machine`, `trace` and `clients` belong to a simulated bench; `scaled_to` and `peers`, which are
    other programs, to a live one. `stored` holds presets of the store by name.
    """

    stored: Mapping[str, Preset] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.preset_names:
            base = name.partition(":")[0]
            if base not in presets() and name not in self.stored:
                raise BadUsage(f"{unknown('preset', name, presets())} ({ALL}: every one)")
            if base in presets() and base != name:
                preset(name)
        for budget in names_of(self.budgets, "--budgets"):
            sizes.budget_nbytes(budget, _ANY)
        for link in names_of(self.links, "--links"):
            if link not in (_LIVE_LINKS if not self.simulate else (AUTO,)):
                sizes.rate(link)
        for name in self.peer_names:
            if name not in PEERS:
                raise BadUsage(f"{unknown('peer', name, PEERS)} ({ALL}: every one)")
        check_experts(self.experts)
        check_activations(self.activations, self.experts)
        check_base(self.base)
        check_dense(self.dense)
        kv_bits(self.kv_cache_dtype)
        check_executor(self.executor)
        Draft.parse(self.draft)
        clients_of(self.clients)
        self._check_mode()
        if self.task_names:
            check_tasks(self.task_names)

    def _check_mode(self) -> None:
        if not self.simulate and (self.jobs or self.executor != LOCAL):
            raise BadUsage(
                "a live bench measures one setting after another: --jobs and --executor are of "
                "--simulate"
            )
        if self.batch and not self.tasks:
            raise BadUsage(
                "--batch is of --tasks: give both; --clients N of --simulate serves many requests "
                "at a time"
            )
        if self.clients and not self.simulate:
            raise BadUsage(
                "a live bench measures one request at a time: --clients is of --simulate"
            )
        if self.simulate and self.peers:
            raise BadUsage("--peers are measured live: leave out --simulate")
        if self.peers and (self.base != FULL_BITS or self.dense is not None):
            raise BadUsage("--peers run the checkpoint as it is: leave out --base and --dense")
        if self.simulate and self.kv_cache_dtype != AUTO:
            raise BadUsage("--kv-cache-dtype is of a live bench: leave out --simulate")
        if self.simulate and self.tasks:
            raise BadUsage("--tasks are evaluated live: leave out --simulate")
        if self.simulate and self.draft != NONE:
            raise BadUsage(
                "--draft is of a live bench: leave out --simulate, or give a --trace that was "
                "recorded with drafts"
            )
        if self.simulate and self.experts != EXACT:
            raise BadUsage("--experts is of a live bench: leave out --simulate")
        if self.simulate and self.scaled_to:
            raise BadUsage("--scaled-to is of a live bench: with --simulate give --machine")
        if not self.simulate and (self.trace or self.machine):
            raise BadUsage(
                "--trace and --machine are of a simulated bench: give --simulate, or live "
                "--scaled-to"
            )
        if self.scaled_to and self.links != AUTO:
            raise BadUsage("--scaled-to sets the link itself: leave out --links")
        for name in (self.scaled_to, self.machine):
            if name not in (None, HERE if self.simulate else None):
                machine(name)

    @property
    def served(self) -> Clients | None:
        """The clients whose requests a simulated bench serves together."""
        return clients_of(self.clients, seed=self.seed)

    @property
    def preset_names(self) -> list[str]:
        """The fixed presets first, then the requested ones, then the random control of each that
        has one."""
        controls = [
            control for name in self._presets_asked if (control := f"{name}-random") in presets()
        ]
        return list(dict.fromkeys((*FIXED, *self._presets_asked, *controls)))

    @property
    def asked(self) -> list[str]:
        """The names of presets and of other programs that were asked for."""
        return [*self._presets_asked, *self.peer_names]

    @property
    def _presets_asked(self) -> list[str]:
        return (
            list(presets()) if self.presets.strip() == ALL else names_of(self.presets, "--presets")
        )

    def of_model(self, store: Path, model_id: str) -> "BenchRequest":
        """The request with stored presets of this model. Raises Incompatible for a preset tuned for
        another model."""
        return replace(self, stored=find_presets(self.stored, store, model_id=model_id))

    @property
    def tuned(self) -> dict[str, dict[str, object]]:
        """The policies of stored presets; part of the bench's identity, since a name can be tuned
        anew."""
        return {name: asdict(one) for name, one in self.stored.items()}

    @property
    def peer_names(self) -> list[str]:
        if self.peers.strip() == ALL:
            return list(PEERS)
        return names_of(self.peers, "--peers") if self.peers else []

    @property
    def task_names(self) -> list[str]:
        return names_of(self.tasks, "--tasks") if self.tasks else []

    @property
    def link_names(self) -> list[str]:
        return [machine(self.scaled_to).name] if self.scaled_to else names_of(self.links, "--links")

    def settings(self) -> list[BenchSetting]:
        """Every preset at every budget over every link; a preset with a budget of its own once a
        link.

        A simulation adds the oracle. Peers have their own links, and vary the budget only if they
        offload.
        """
        names = [*self.preset_names, ORACLE] if self.simulate else self.preset_names
        tried = product(self.link_names, names_of(self.budgets, "--budgets"), names)
        ours = [BenchSetting(name, _budget(name, budget), link) for link, budget, name in tried]
        peers = product(
            (PEERS[name] for name in self.peer_names), names_of(self.budgets, "--budgets")
        )
        theirs = [
            BenchSetting(one.name, budget if one.offload else EVERYTHING, one.link)
            for one, budget in peers
        ]
        return list(dict.fromkeys(ours + theirs))


def _budget(name: str, budget: str) -> str:
    return (
        presets()[base].budget if (base := name.partition(":")[0]) in presets() else None
    ) or budget


def names_of(text: str, option: str) -> list[str]:
    names = names_in(text)
    if not all(names):
        raise BadUsage(f"{option} {text!r} has an empty name in it: separate names by one comma")
    return list(dict.fromkeys(names))
