"""What prefetching and what miss policies do on traces of real models, beside loading on demand.

    python -m tools.bench.real_traces_served
    python -m tools.bench.real_traces_served --traces FOLDER --only mixtral-8x7b --write docs/traces.md

Every policy whose columns the trace has, over `lru`, from a cold cache, without the clock; traces, sizes and intervals
are those of `tools.bench.real_traces`. A step's prefetches bring as many experts as `--window` says.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from artifacts.shape import Shape
from artifacts.traces.next_use import NextUse
from artifacts.traces.parquet import read_parquet
from runtime.control.counters import Counters
from runtime.policies.presets import Scope
from tools.bench.performance import Section, Table, conditions, write
from tools.bench.real_traces import (
    OURS,
    RESAMPLINGS,
    Cell,
    RealTrace,
    allowed,
    first_passes,
    half,
    options,
    present,
    replayed,
    units_of,
)

PLACES = ((Scope.LAYER, 0.25), (Scope.GLOBAL, 0.125), (Scope.GLOBAL, 0.25), (Scope.GLOBAL, 0.5))
_COMMAND = "python -m tools.bench.real_traces_served --traces FOLDER"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--window", type=int, default=1, help="experts that a step's prefetches bring")
    chosen = parser.parse_args()
    sections = []
    for real, path in present(chosen):
        served = Served(real, path, tokens=chosen.tokens, window=chosen.window)
        sections.append(Section(f"{real.name}-served", [served.prefetched(), served.missed()]))
        for table in sections[-1].tables:
            print(table.markdown(), flush=True)
    if chosen.write and sections:
        write(chosen.write, sections, conditions(f"{_COMMAND} --tokens {chosen.tokens} --window {chosen.window}"))


class Served:
    """The tables of one trace."""

    def __init__(self, real: RealTrace, path: Path, *, tokens: int, window: int) -> None:
        self.trace = first_passes(read_parquet(path, num_experts=real.num_experts), tokens, apart=real.apart)
        self._told, self._window = real.told, window
        self.shape = Shape(self.trace.num_layers, real.num_experts, self.trace.top_k, 1)
        self._future, self._units = NextUse.of(self.trace, self.shape), units_of(self.trace)[0]
        count = int(self._units.max()) + 1
        self._weights = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLINGS)
        self._on_demand = {place: self._run({}, *place) for place in self.places}

    @property
    def places(self) -> list[tuple[Scope, float]]:
        """Scopes and sizes at which there is something to choose."""
        least = (self.shape.top_k + 1) * self.shape.num_layers
        return [(scope, size) for scope, size in PLACES if scope == Scope.GLOBAL or self._slots(size) >= least]

    def prefetched(self) -> Table:
        """Hit rates of every prefetch policy, and how much more it brings."""
        names, lacking = allowed(self.trace, "prefetch")
        columns = ("prefetch", *map(_named, self.places), *(f"brought, {_named(place)}" for place in self.places))
        rows = [(f"`{name}`", *self._row({"prefetch": name})) for name in names]
        for name in ("none", "affinity"):
            rows.append((f"`{name}`, evicted by `{OURS}`", *self._row({"eviction": OURS, "prefetch": name})))
        return Table(
            f"{self._told}: prefetching", columns, rows, f"the trace lacks what these need: {_listed(lacking)}"
        )

    def _row(self, policies: Mapping[str, str]) -> Iterator[str]:
        found = {place: self._run(policies, *place) for place in self.places}
        for counters in found.values():
            cell = Cell.of(counters)
            spread = half(cell.rates(self._units, self._weights))
            yield f"{cell.hits.sum() / cell.requests.sum():.3f} ± {spread:.3f}"
        for place, counters in found.items():
            yield f"{_brought(counters) / _brought(self._on_demand[place]):.2f}"

    def missed(self) -> Table:
        """Of each miss policy what it loads and computes near, and the ranks that it alters."""
        names, lacking = allowed(self.trace, "miss")
        rows = [(f"`{name}`", *(self._shares(name, place) for place in self.places)) for name in names]
        columns = ("miss", *map(_named, self.places))
        return Table(f"{self._told}: misses", columns, rows, f"the trace lacks what these need: {_listed(lacking)}")

    def _shares(self, name: str, place: tuple[Scope, float]) -> str:
        totals = self._run({"miss": name}, *place).totals()
        altered = (totals["replaced_ranks"] + totals["dropped_ranks"]) / self.trace.experts.size
        return f"{totals['fetched'] / totals['requests']:.3f}, {totals['near'] / totals['requests']:.3f}, {altered:.3f}"

    def _run(self, policies: Mapping[str, str], scope: Scope, size: float) -> Counters:
        slots, window = self._slots(size), self._window if policies.get("prefetch", "none") != "none" else 0
        own = {"eviction": "lru"} | policies
        return replayed(self.trace, self.shape, self._future, own, slots=slots, scope=scope, window=window)

    def _slots(self, size: float) -> int:
        return round(self.shape.num_keys * size)


def _named(place: tuple[Scope, float]) -> str:
    return f"{place[0]} {100 * place[1]:g} %"


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _brought(counters: Counters) -> int:
    """Experts loaded, on demand and ahead."""
    totals = counters.totals()
    return totals["demand_bytes"] + totals["prefetch_bytes"]


if __name__ == "__main__":
    main()
