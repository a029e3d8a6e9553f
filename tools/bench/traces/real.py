"""Hit rates of every eviction policy on traces of real models, with intervals, beside Belady.

    python -m tools.bench.traces.real
    python -m tools.bench.traces.real --traces FOLDER --only gpt-oss-20b-mmlu --write docs/lab/traces.md
    python -m tools.bench.traces.real --trace mixed.parquet --num-experts 32 --prefetch next_gate

Loading on demand from a cold cache, without the clock, of the first `--tokens` tokens of a trace in
whole passes. Every eviction policy whose columns the trace has; columns of the table are scope and
size of the cache, as a share of all experts, where a layer has more slots than a token selects:
otherwise there is nothing to choose. An interval is of 1,000 resamplings of the requests (2.5 to
97.5 %), or of the passes where requests are decoded together: it says how much the figure depends
on which requests were asked, and knows nothing of other texts. `gap closed` is the place of
`horizon` between the best of the others that do not know the future (0; `late_horizon` aside) and
Belady (100 %), resampled with them. Files that the folder lacks are skipped.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from artifacts.errors import BadInput
from artifacts.shape import Shape
from artifacts.traces.next_use import NextUse
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import Trace
from moectl.bundled import bundled_trace
from runtime.control.build import build_controller
from runtime.control.counters import Counters
from runtime.policies import POLICIES, build
from runtime.policies.base import Artefacts, SimpleEviction
from runtime.policies.presets import Scope, preset
from runtime.replay.checks import check_columns
from runtime.replay.replay import replay
from tools import TRACE
from tools.arguments import parser_of
from tools.bench.performance import Section, Table, check_places, conditions, write
from tools.reproductions.intervals import resampled

SIZES = (0.0625, 0.125, 0.25, 0.5)
VARIANTS = {
    "least_stale": ("least_stale", "least_stale:within=ascending"),
    "drop": ("drop", "drop:rank=2"),
}
BOUND = "belady"
OURS = "horizon"
LATE = "late_horizon"
_LEAST_GAP = 0.005


@dataclass(frozen=True, slots=True)
class RealTrace:
    """A trace: the name of its section, its file, experts of a layer, and what a reader has to know
    of it. `apart`: requests that were decoded together are replayed one after the other."""

    name: str
    file: str
    num_experts: int
    told: str
    apart: bool = False


TRACES = (
    RealTrace(
        "gpt-oss-20b",
        "",
        32,
        "gpt-oss-20b, bundled: the beginnings of 8 answers to GPQA and of 8 to MMLU",
    ),
    RealTrace("gpt-oss-20b-mmlu", "gpt-oss-20b-mmlu.parquet", 32, "gpt-oss-20b, MMLU"),
    RealTrace("gpt-oss-20b-gpqa", "gpt-oss-20b-gpqa.parquet", 32, "gpt-oss-20b, GPQA extended"),
    RealTrace("gpt-oss-20b-mmlupro", "gpt-oss-20b-mmlupro.parquet", 32, "gpt-oss-20b, MMLU-Pro"),
    RealTrace(
        "mixtral-8x7b",
        "mixtral-8x7b-humaneval-gsm8k.parquet",
        8,
        "Mixtral-8x7B-Instruct, HumanEval and GSM8K",
    ),
    RealTrace(
        "qwen1.5-moe-together",
        "qwen1.5-moe-a2.7b-gsm8k-5layers.parquet",
        60,
        "Qwen1.5-MoE-A2.7B-Chat, 5 of 24 layers, GSM8K, 25 requests decoded together",
    ),
    RealTrace(
        "qwen1.5-moe-apart",
        "qwen1.5-moe-a2.7b-gsm8k-5layers.parquet",
        60,
        "Qwen1.5-MoE-A2.7B-Chat, 5 of 24 layers, GSM8K, the same requests one after the other",
        apart=True,
    ),
    RealTrace(
        "bundled-model",
        "",
        32,
        "the bundled model (4 M parameters), held-out docstrings, prompts included",
    ),
)


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """Hits and requests [P] of one replay by pass."""

    hits: np.ndarray
    requests: np.ndarray

    @classmethod
    def of(cls, counters: Counters) -> "Cell":
        return cls(*np.array(counters.hits_by_pass()).T)

    def rates(self, units: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Hit rates [B] when unit u [of P] counts `weights` [B, U] times."""
        hits, requests = (
            weights @ np.bincount(units, column) for column in (self.hits, self.requests)
        )
        return hits / requests


def main() -> None:
    parser = options(
        __doc__,
        trace=(Path, "one trace in Parquet instead"),
        num_experts=(32, "of each layer of that trace"),
        prefetch=("none", "a policy whose predictions the trace has, with every eviction"),
        window=(2, "experts that a step's prefetches bring"),
    )
    chosen = parser.parse_args()
    command = f"python -m tools.bench.traces.real --traces FOLDER --tokens {chosen.tokens}"
    ahead = {"prefetch": chosen.prefetch, "window": chosen.window}
    tabulate(
        chosen, present(chosen), lambda *one: [measured(*one, chosen.tokens, **ahead)], command
    )


def tabulate(
    chosen: argparse.Namespace,
    found: Iterable[tuple[RealTrace, Path]],
    tables: Callable[[RealTrace, Path], list[Table]],
    command: str,
    suffix: str = "",
) -> None:
    """Print the tables of each trace and write them into its section of the page, whose name ends
    in `suffix`."""
    named = {f"{real.name}{suffix}": (real, path) for real, path in found}
    if chosen.write:
        check_places(chosen.write, named)
    sections = []
    for name, one in named.items():
        sections.append(Section(name, tables(*one)))
        for table in sections[-1].tables:
            print(table.markdown(), flush=True)
    if chosen.write and sections:
        write(chosen.write, sections, conditions(command))


def present(chosen: argparse.Namespace) -> Iterator[tuple[RealTrace, Path]]:
    """Yield the traces asked for and their files, and say which are skipped."""
    if getattr(chosen, "trace", None):
        yield RealTrace(chosen.trace.stem, "", chosen.num_experts, chosen.trace.name), chosen.trace
        return
    for real in TRACES:
        if chosen.only and real.name not in chosen.only:
            continue
        path = _path(real, chosen.traces)
        if path is None or not path.is_file():
            print(
                f"{real.name}: skipped, "
                f"{'--traces is not given' if path is None else f'there is no {path}'}"
            )
            continue
        yield real, path


def _path(real: RealTrace, folder: Path | None) -> Path | None:
    if real.file:
        return folder / real.file if folder else None
    return TRACE if real.name == "bundled-model" else bundled_trace(Path(real.name))


class Prepared:
    """The first tokens of a trace, and its resamplings: unit u of `units` [P] counts `weights` [B,
    U] times. An expert is one byte of `shape`."""

    def __init__(self, trace: Trace, num_experts: int) -> None:
        self.trace = trace
        self.shape = Shape(trace.num_layers, num_experts, trace.top_k, 1)
        self.units, self.unit = units_of(self.trace)
        self.weights = resampled(int(self.units.max()) + 1)[1:]
        self._future = NextUse.of(self.trace, self.shape)

    @classmethod
    def of_file(cls, real: RealTrace, path: Path, tokens: int) -> "Prepared":
        trace = read_parquet(path, num_experts=real.num_experts)
        return cls(first_passes(trace, tokens, apart=real.apart), real.num_experts)

    def has_choice(self, scope: Scope, size: float) -> bool:
        """Return whether a layer has more slots than a token selects; always true with global
        scope."""
        return (
            scope == Scope.GLOBAL
            or self._slots(size) >= (self.shape.top_k + 1) * self.shape.num_layers
        )

    def replayed(
        self,
        policies: Mapping[str, str],
        scope: Scope,
        size: float,
        *,
        window: int = 0,
        eviction: SimpleEviction | None = None,
    ) -> Counters:
        """Replay the preset on-demand with other `policies` in a cache of `size`, a share of all
        experts. At each step prefetches may bring `window` experts. `eviction` is a policy that has
        no name."""
        built = build(preset("on-demand").texts() | policies)
        controller = build_controller(
            replace(built, eviction=eviction) if eviction else built,
            self.shape,
            num_slots=self._slots(size),
            scope=scope,
            window=window,
            artefacts=Artefacts(next_use=self._future),
        )
        replay(self.trace, controller)
        return controller.counters

    def _slots(self, size: float) -> int:
        return round(self.shape.num_keys * size)


def measured(
    real: RealTrace, path: Path, tokens: int, *, prefetch: str = "none", window: int = 0
) -> Table:
    """Replay every policy in every scope and size; return the table."""
    prepared = Prepared.of_file(real, path, tokens)
    trace = prepared.trace
    shape = prepared.shape
    policies, left_out = allowed(trace)
    columns = []
    cells = {name: [] for name in (*policies, "gap closed")}
    for scope in Scope:
        for size in SIZES:
            if not prepared.has_choice(scope, size):
                continue
            columns.append(named(scope, size))
            found = {
                name: Cell.of(
                    prepared.replayed(
                        {"eviction": name, "prefetch": prefetch},
                        scope,
                        size,
                        window=window if prefetch != "none" else 0,
                    )
                )
                for name in policies
            }
            for name, text in cell_texts(found, prepared.units, prepared.weights).items():
                cells[name].append(text)
    tokens_held = int((trace.layer == 0).sum())
    requests = len(np.unique(trace.request))
    lacking = listed(left_out)
    note = (
        f"{tokens_held:,} tokens, {requests} requests, {shape.num_layers} layers, {shape.top_k} "
        f"of {shape.num_experts} experts; intervals by {prepared.unit}; the trace lacks what "
        f"these need: {lacking}"
    )
    rows = [(f"`{name}`" if name in policies else name, *texts) for name, texts in cells.items()]
    return Table(real.told, ("eviction", *columns), rows, note)


def first_passes(trace: Trace, tokens: int, *, apart: bool) -> Trace:
    """Return the first passes, of at most `tokens` tokens together; `apart` first gives each
    request passes of its own."""
    passes = trace.pass_indices()
    if apart:
        passes = trace.request.astype(np.int64) * (int(passes.max()) + 1) + passes
    passes = np.unique(passes, return_inverse=True)[1]
    ends = np.bincount(passes[trace.layer == 0]).cumsum()
    kept = np.flatnonzero(passes < max(1, np.searchsorted(ends, tokens, side="right")))
    cut = replace(trace, pass_=passes.astype(np.int32)).take(kept)
    return cut.take(np.lexsort((cut.layer, cut.pass_)))


def units_of(trace: Trace) -> tuple[np.ndarray, str]:
    """The unit of resampling of each pass [P], and what it is: its request, or the pass where it
    has several."""
    passes = trace.pass_indices()
    pairs = np.unique(np.stack((passes, trace.request)), axis=1)
    if len(pairs[0]) > passes.max() + 1:
        return np.arange(passes.max() + 1), "pass"
    return np.unique(pairs[1], return_inverse=True)[1], "request"


def allowed(trace: Trace, axis: str = "eviction") -> tuple[list[str], list[str]]:
    """Return the policies of an axis whose columns the trace has, the ones that know the future
    last; and all others of the axis."""
    names = [name for policy in POLICIES[axis] for name in VARIANTS.get(policy, (policy,))]
    can = []
    cannot = []
    for name in sorted(names, key=(OURS, LATE, BOUND, "oracle").__contains__):
        try:
            policies = build(preset("on-demand").texts() | {axis: name})
            check_columns(trace, policies)
        except BadInput:
            cannot.append(name)
            continue
        (can if not policies.requires - {"next_use"} else cannot).append(name)
    return can, cannot


def named(scope: Scope, size: float) -> str:
    """A column of the tables."""
    return f"{scope} {100 * size:g} %"


def listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


def cell_texts(found: Mapping[str, Cell], units: np.ndarray, weights: np.ndarray) -> dict[str, str]:
    """The text of each policy's cell, and of the gap that `horizon` closes."""
    once = np.ones((1, weights.shape[1]))
    points = {name: cell.rates(units, once)[0] for name, cell in found.items()}
    spread = {name: cell.rates(units, weights) for name, cell in found.items()}
    told = {name: f"{points[name]:.3f} ± {half(spread[name]):.3f}" for name in found}
    best = max((name for name in found if name not in (OURS, LATE, BOUND)), key=points.get)
    told[best] = f"**{told[best]}**"
    gap = points[BOUND] - points[best]
    if gap < _LEAST_GAP:
        return told | {"gap closed": "–"}
    closed = (spread[OURS] - spread[best]) / (spread[BOUND] - spread[best])
    share = (points[OURS] - points[best]) / gap
    return told | {
        "gap closed": (
            f"{share:.0%} ({np.percentile(closed, 2.5):.0%} to {np.percentile(closed, 97.5):.0%})"
        )
    }


def half(values: np.ndarray) -> float:
    """Half the width of the interval."""
    low, high = np.percentile(values, [2.5, 97.5])
    return (high - low) / 2


def options(description: str, **own: object) -> argparse.ArgumentParser:
    """The options that all tables of real traces take, and a tool's own."""
    parser = parser_of(
        description,
        traces=(Path, "folder of the traces that are not bundled"),
        tokens=(2500, "of a trace, at most"),
        write=(Path, "put the tables into this page"),
        **own,
    )
    parser.add_argument(
        "--only", nargs="+", choices=[real.name for real in TRACES], help="traces by name; else all"
    )
    return parser


if __name__ == "__main__":
    main()
