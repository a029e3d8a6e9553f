"""`moectl inspect substitution`: what substituting resident experts for absent ones costs on
held-out text."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from artifacts.errors import BadUsage
from artifacts.store.rows import buddy_matrices, entropy_percentiles
from artifacts.store.store import Store
from moectl.bundled import demo_model
from moectl.commands.build.build_buddies import (
    DEFAULT_ALPHA,
    METRICS,
    cut,
    find_profile,
    metric_scores,
)
from moectl.shared.opening import open_quietly
from moectl.shared.terminal.progress import progress_bar
from moectl.shared.text import read_data
from moectl.show.render import Sheet, fewer, show_json, show_sheet
from profilers.text.batches import Data
from runtime.model.open import MoeModel
from runtime.policies import parse
from runtime.policies.base import Artefacts, Miss
from tools.lab.price_substitution import (
    Substitution,
    SubstitutionLimits,
    SubstitutionPrice,
    buddy_policy,
    random_residents,
)

CONTROLS = ("zero", "random_resident", "best_resident")
K_MAX = 16
LENGTH = 256
LIMITS = (
    SubstitutionLimits("none"),
    SubstitutionLimits("rho 1", rho=1),
    SubstitutionLimits("gates", percentile=15, margin=0.5, beta=0.75),
    SubstitutionLimits("gates, rho 1", percentile=15, margin=0.5, beta=0.75, rho=1),
)


@dataclass(frozen=True, slots=True)
class SubstitutionRequest:
    """The held-out text to measure on, the shares of resident experts, and the random draws of each
    share."""

    data: str
    tokens: int
    draws: int
    shares: tuple[float, ...]
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SubstitutionRow:
    """One policy under one set of limits at one share of residents: means over the draws, and the
    extreme ratios.

    `absent` and `replaced` are shares of all ranks; the mean of the ratios is geometric;
    `loss_error` is the standard error of the ratio of one draw, whose text is that of all.
    """

    resident: float
    limits: str
    policy: str
    absent: float
    replaced: float
    perplexity_ratio: float
    lowest: float
    highest: float
    loss_error: float


@dataclass(frozen=True, slots=True)
class PricedSubstitution:
    """The rows, and the conditions of the measurement."""

    rows: list[SubstitutionRow]
    perplexity: float
    conditions: str


def parse_shares(text: str) -> tuple[float, ...]:
    """Parse shares such as `0.75,0.5`. Raises BadUsage unless each is above 0 and at most 1."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise BadUsage(f"shares {text!r} are not numbers: write them as 0.75,0.5") from None
    if not all(0 < share <= 1 for share in shares):
        raise BadUsage(f"shares of resident experts are above 0 and at most 1, not {text}")
    return shares


def refuse_views(*, heatmap: bool, layer: int | None) -> None:
    """Raise BadUsage for views that do not exist: all layers are priced together."""
    if heatmap or layer is not None:
        raise BadUsage(
            "inspect substitution prices all layers together: leave out --layer and --heatmap"
        )


def substitution(
    name: str | None,
    request: SubstitutionRequest,
    *,
    store: Path,
    run: int | None,
    device: str,
    threads: int,
) -> PricedSubstitution:
    """Price every metric's buddies and the controls on a model whose profile is in the store.

    Raises BadInput (no store, no text), Incompatible (no profile of this model, or one without
    similarity).
    """
    torch.set_num_threads(threads)
    opened = open_quietly(name or str(demo_model()), device=device)
    policies, entropy = _policies(opened, store, run, name=name or "the bundled model")
    data = read_data(
        opened, request.data, length=LENGTH, num_tokens=request.tokens, seed=request.seed
    )
    pricing = Substitution(opened, data.sequences, entropy)
    rows = []
    with progress_bar("pricing", unit="settings") as advance:
        total = len(request.shares) * len(LIMITS) * len(policies)
        for share in request.shares:
            draws = [
                random_residents(opened.shape, share, request.seed + draw)
                for draw in range(request.draws)
            ]
            for limits in LIMITS:
                for policy, make in policies.items():
                    prices = [
                        pricing.price(make(draw), limits, residents)
                        for draw, residents in enumerate(draws)
                    ]
                    rows.append(_row(share, limits.name, policy, prices))
                    advance(len(rows), total)
    return PricedSubstitution(rows, pricing.perplexity, _conditions(request, data))


def show(priced: PricedSubstitution, *, as_json: bool) -> None:
    """Print the ratios and the shares of replaced ranks, a column for each policy."""
    if as_json:
        show_json(asdict(priced))
        return
    show_sheet(_sheet(priced, "Perplexity over the full model's (+- standard error)", _ratio))
    show_sheet(
        _sheet(
            priced,
            "Share of ranks replaced",
            lambda row: f"{row.replaced:.3f}",
            note=priced.conditions,
        )
    )


def _policies(
    opened: MoeModel, store: Path, run: int | None, *, name: str
) -> tuple[dict[str, Callable[[int], Miss]], np.ndarray]:
    """Return, controls first, functions that make each policy for a draw, and the profile's entropy
    [L, 101]."""
    shape = opened.shape
    with Store.open(store, read_only=True) as stored:
        model = stored.require_model(opened.fingerprint, name=name)
        profile = find_profile(stored, run, model_id=model.model_id)
        entropy = entropy_percentiles(stored.read("entropy", profile.run_id))
        scores = {
            metric: metric_scores(stored, profile, shape, metric) for metric in reversed(METRICS)
        }
    made: dict[str, Callable[[int], Miss]] = {
        control: _control(opened, control) for control in CONTROLS
    }
    for metric, q in scores.items():
        rows = cut(q, [DEFAULT_ALPHA] * shape.num_layers, K_MAX)
        buddies, shares = buddy_matrices(rows, shape.num_layers, shape.num_experts)
        policy = buddy_policy(Artefacts(buddies=buddies, buddy_q=shares), shape)
        made[metric] = lambda draw, policy=policy: policy
    return made, entropy


def _control(opened: MoeModel, name: str) -> Callable[[int], Miss]:
    def make(draw: int) -> Miss:
        policy = parse("miss", f"{name}:seed={draw}" if name == "random_resident" else name)
        policy.prepare(opened.shape, Artefacts())
        return policy

    return make


def _row(
    share: float, limits: str, policy: str, prices: list[SubstitutionPrice]
) -> SubstitutionRow:
    ratios = np.array([price.ratio for price in prices])
    return SubstitutionRow(
        resident=share,
        limits=limits,
        policy=policy,
        absent=float(np.mean([price.absent for price in prices])),
        replaced=float(np.mean([price.replaced for price in prices])),
        perplexity_ratio=float(np.exp(np.log(ratios).mean())),
        lowest=float(ratios.min()),
        highest=float(ratios.max()),
        loss_error=float(np.mean([price.loss_error for price in prices])),
    )


def _ratio(row: SubstitutionRow) -> str:
    return f"{row.perplexity_ratio:.3f} ({row.loss_error:.3f})"


def _sheet(
    priced: PricedSubstitution, title: str, cell: Callable[[SubstitutionRow], str], note: str = ""
) -> Sheet:
    policies = list(dict.fromkeys(row.policy for row in priced.rows))
    lines = [
        priced.rows[start : start + len(policies)]
        for start in range(0, len(priced.rows), len(policies))
    ]
    rows = [(f"{line[0].resident:g}", line[0].limits, *map(cell, line)) for line in lines]
    return Sheet(title, ("resident", "limits", *policies), rows, note)


def _conditions(request: SubstitutionRequest, data: Data) -> str:
    gates = LIMITS[2]
    return (
        f"{data.num_tokens:,} tokens of {request.data} in sequences of up to "
        f"{LENGTH}{fewer(data.shortfall)}; residents drawn {request.draws} times from seed "
        f"{request.seed}, as many in every layer; lists of alpha {DEFAULT_ALPHA}, k_max {K_MAX}; "
        f"gates: entropy above percentile {gates.percentile:g}, margin {gates.margin:g}, beta "
        f"{gates.beta:g}; what is not replaced is exact; {', '.join(CONTROLS)}: controls"
    )
