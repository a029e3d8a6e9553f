"""`moectl inspect precision`: what few bits cost on held-out text, by width and by the assignment
of widths."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa
import torch

from artifacts.errors import BadUsage
from artifacts.store.runs import RunInfo, utc_now, versions
from artifacts.store.store import Store, add_run
from moectl.bundled import demo_model
from moectl.shared.opening import open_quietly
from moectl.shared.stores import check_store
from moectl.shared.terminal.progress import progress_bar
from moectl.shared.text import read_data
from moectl.show.render import NumBytes, Sheet, fewer, show_json, show_sheet
from profilers.text.corpus import data_digest
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.session.artefacts import load_artefacts
from tools.lab.price_precision import (
    PRESET,
    BitAssignment,
    Precision,
    PrecisionPrice,
    assignments,
    check_widths,
)

COMMAND = "precision"
LENGTH = 256


@dataclass(frozen=True, slots=True)
class PrecisionRequest:
    """The held-out text to measure on, and the number of random assignments of every average."""

    data: str
    tokens: int
    draws: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PrecisionRow:
    """One assignment of bits to experts. Several draws have one row: means (geometric for ratios)
    and extremes.

    `share` is of the bytes of all experts in the checkpoint; `kl` is in nats, `loss_error` the
    standard error of a draw's ratio.
    """

    avg_bits: float
    assignment: str
    nbytes: int
    share: float
    perplexity_ratio: float
    lowest: float
    highest: float
    kl: float
    top1_agreement: float
    loss_error: float


@dataclass(frozen=True, slots=True)
class PricedPrecision:
    """The rows, the run of the store that holds them, and the conditions of the measurement."""

    run: int
    rows: list[PrecisionRow]
    perplexity: float
    conditions: str


def refuse_views(*, heatmap: bool, layer: int | None, run: int | None) -> None:
    """Raise BadUsage for views that do not exist: all layers are priced together, with the newest
    replicas."""
    if heatmap or layer is not None or run is not None:
        raise BadUsage(
            "inspect precision prices the newest replicas of all layers: leave out --run, "
            "--layer, --heatmap"
        )


def precision(
    name: str | None, request: PrecisionRequest, *, store: Path, device: str, threads: int
) -> PricedPrecision:
    """Price the model's replicas in the store, and write the result into it, all rows or none.

    Raises BadInput (no text, a damaged replica) and Incompatible (no replicas of this model).
    """
    torch.set_num_threads(threads)
    started_at = utc_now()
    begin_s = perf_counter()
    opened = open_quietly(name or str(demo_model()), device=device)
    artefacts = _artefacts(opened, store, name=name or "the bundled model")
    data = read_data(
        opened, request.data, length=LENGTH, num_tokens=request.tokens, seed=request.seed
    )
    sequences = data.sequences
    check_store(store)
    pricing = Precision(opened, artefacts, sequences)
    priced = _prices(
        pricing, assignments(artefacts.replicas, draws=request.draws, seed=request.seed)
    )
    info = RunInfo(
        command=COMMAND,
        model_id=opened.fingerprint[:16],
        started_at=started_at,
        seconds=perf_counter() - begin_s,
        data=request.data,
        data_digest=data_digest(sequences),
        tokens=sum(map(len, sequences)),
        seed=request.seed,
        parameters={
            "draws": request.draws,
            "length": LENGTH,
            "perplexity": pricing.perplexity,
            "shortfall": data.shortfall,
        },
    )
    run_id = add_run(store, info, {"bench": _bench(priced)})
    rows = [
        _row(list(group), opened.shape.nbytes)
        for _, group in groupby(priced, key=lambda pair: _kind(pair[0]))
    ]
    return PricedPrecision(run_id, rows, pricing.perplexity, _conditions(request, info, opened))


def show(priced: PricedPrecision, *, as_json: bool) -> None:
    """Print a line for each assignment of bits to experts."""
    if as_json:
        show_json(asdict(priced))
    else:
        show_sheet(_sheet(priced))


def _artefacts(opened: MoeModel, store: Path, *, name: str) -> Artefacts:
    artefacts = Artefacts()
    if store.exists():
        with Store.open(store, read_only=True) as stored:
            model = stored.require_model(opened.fingerprint, name=name)
            artefacts = load_artefacts(stored, model.model_id, opened.shape)
    check_widths(artefacts)
    return artefacts


def _prices(
    pricing: Precision, wanted: Sequence[BitAssignment]
) -> list[tuple[BitAssignment, PrecisionPrice]]:
    priced = []
    with progress_bar("pricing", unit="assignments") as advance:
        for assignment in wanted:
            priced.append((assignment, pricing.price(assignment)))
            advance(len(priced), len(wanted))
    return priced


def _bench(priced: Sequence[tuple[BitAssignment, PrecisionPrice]]) -> pa.Table:
    """Return a row of the table `bench` for each measurement; columns of time and traffic stay
    NULL."""
    return pa.Table.from_pylist(
        [
            {
                "preset": f"{PRESET} --residency {assignment.residency}",
                "budget": assignment.settings.budget,
                "link": "none",
                "mode": COMMAND,
                "peak_fast_bytes": price.nbytes,
                "perplexity_ratio": price.perplexity_ratio,
                "kl": price.kl,
                "top1_agreement": price.top1_agreement,
            }
            for assignment, price in priced
        ]
    )


def _kind(assignment: BitAssignment) -> tuple[float, str]:
    return assignment.avg_bits, assignment.name


def _row(draws: Sequence[tuple[BitAssignment, PrecisionPrice]], full_nbytes: int) -> PrecisionRow:
    prices = [price for _, price in draws]
    ratios = np.array([price.perplexity_ratio for price in prices])
    nbytes = max(price.nbytes for price in prices)
    return PrecisionRow(
        *_kind(draws[0][0]),
        nbytes=nbytes,
        share=nbytes / full_nbytes,
        perplexity_ratio=float(np.exp(np.log(ratios).mean())),
        lowest=float(ratios.min()),
        highest=float(ratios.max()),
        kl=float(np.mean([price.kl for price in prices])),
        top1_agreement=float(np.mean([price.top1_agreement for price in prices])),
        loss_error=float(np.mean([price.loss_error for price in prices])),
    )


def _sheet(priced: PricedPrecision) -> Sheet:
    columns = (
        "bits",
        "assignment",
        "bytes",
        "% of checkpoint",
        "perplexity ratio",
        "+-",
        "KL",
        "top-1 agreement",
    )
    rows = [
        (
            f"{row.avg_bits:g}",
            row.assignment,
            NumBytes(row.nbytes),
            f"{100 * row.share:.1f}",
            _ratio(row),
            f"{row.loss_error:.4f}",
            f"{row.kl:.4f}",
            f"{row.top1_agreement:.3f}",
        )
        for row in priced.rows
    ]
    return Sheet(
        "Held-out text at few bits", columns, rows, f"run {priced.run}: {priced.conditions}"
    )


def _ratio(row: PrecisionRow) -> str:
    extremes = f" ({row.lowest:.4f} to {row.highest:.4f})" if row.lowest < row.highest else ""
    return f"{row.perplexity_ratio:.4f}{extremes}"


def _conditions(request: PrecisionRequest, info: RunInfo, opened: MoeModel) -> str:
    installed = versions()
    perplexity = info.parameters["perplexity"]
    short = str(info.parameters["shortfall"])
    return (
        f"{info.tokens:,} tokens of {request.data} in sequences of up to {LENGTH}{fewer(short)}, "
        f"teacher-forced, on which the checkpoint's perplexity is {perplexity:.4g} (experts: "
        f"{opened.expert_format}); every expert on its replica, none at full precision; of an "
        "average all take the bytes of its prefix split, or less (without one, those of experts "
        "of the two widths beside it); +-: standard error of the ratio; random drawn "
        f"{request.draws} times from seed {request.seed}; torch {installed['torch']}, "
        f"transformers {installed['transformers']}, {info.seconds:.0f} s"
    )
