"""Effects of prefetching and of miss policies on traces of real models, beside loading on demand.

    python -m tools.bench.traces.served
    python -m tools.bench.traces.served --traces FOLDER --only mixtral-8x7b --write docs/traces.md

Every policy whose columns the trace has, over `lru`, from a cold cache, without the clock. Traces,
sizes and intervals are as in `tools.bench.traces.real`. A step's prefetches bring as many experts
as `--window` says.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path

from runtime.control.counters import Counters
from runtime.policies.presets import Scope
from tools.bench.performance import Table
from tools.bench.traces.real import (
    OURS,
    Cell,
    Prepared,
    RealTrace,
    allowed,
    half,
    listed,
    named,
    options,
    present,
    tabulate,
)

PLACES = ((Scope.LAYER, 0.25), (Scope.GLOBAL, 0.125), (Scope.GLOBAL, 0.25), (Scope.GLOBAL, 0.5))


def main() -> None:
    chosen = options(__doc__, window=(1, "experts that a step's prefetches bring")).parse_args()

    def tables(real: RealTrace, path: Path) -> list[Table]:
        served = Served(real, path, tokens=chosen.tokens, window=chosen.window)
        return [served.prefetched(), served.missed()]

    command = "python -m tools.bench.traces.served --traces FOLDER"
    command += f" --tokens {chosen.tokens} --window {chosen.window}"
    tabulate(chosen, present(chosen), tables, command, "-served")


class Served:
    """The tables of one trace."""

    def __init__(self, real: RealTrace, path: Path, *, tokens: int, window: int) -> None:
        self._prepared = Prepared(real, path, tokens)
        self._told = real.told
        self._window = window
        self._places = [place for place in PLACES if self._prepared.has_choice(*place)]
        self._on_demand = {place: self._run({}, *place) for place in self._places}

    def prefetched(self) -> Table:
        """Return a table of the hit rate of every prefetch policy, and how many more experts it
        brings."""
        names, lacking = allowed(self._prepared.trace, "prefetch")
        columns = (
            "prefetch",
            *starmap(named, self._places),
            *(f"brought, {named(*place)}" for place in self._places),
        )
        rows = [(f"`{name}`", *self._row({"prefetch": name})) for name in names]
        for name in ("none", "affinity"):
            rows.append(
                (f"`{name}`, evicted by `{OURS}`", *self._row({"eviction": OURS, "prefetch": name}))
            )
        return self._table("prefetching", columns, rows, lacking)

    def _row(self, policies: Mapping[str, str]) -> Iterator[str]:
        found = {place: self._run(policies, *place) for place in self._places}
        for counters in found.values():
            cell = Cell.of(counters)
            spread = half(cell.rates(self._prepared.units, self._prepared.weights))
            yield f"{cell.hits.sum() / cell.requests.sum():.3f} ± {spread:.3f}"
        for place, counters in found.items():
            yield f"{_brought(counters) / _brought(self._on_demand[place]):.2f}"

    def missed(self) -> Table:
        """Return a table of each miss policy's shares: loaded and computed near, of the requests,
        and altered, of the ranks."""
        names, lacking = allowed(self._prepared.trace, "miss")
        rows = [
            (f"`{name}`", *(self._shares(name, place) for place in self._places)) for name in names
        ]
        columns = ("miss", *starmap(named, self._places))
        return self._table("misses", columns, rows, lacking)

    def _table(
        self, what: str, columns: tuple[str, ...], rows: Sequence[tuple], lacking: list[str]
    ) -> Table:
        note = f"the trace lacks what these need: {listed(lacking)}"
        return Table(f"{self._told}: {what}", columns, rows, note)

    def _shares(self, name: str, place: tuple[Scope, float]) -> str:
        totals = self._run({"miss": name}, *place).totals()
        altered = (
            totals["replaced_ranks"] + totals["dropped_ranks"]
        ) / self._prepared.trace.experts.size
        return (
            f"{totals['fetched'] / totals['requests']:.3f}, "
            f"{totals['near'] / totals['requests']:.3f}, {altered:.3f}"
        )

    def _run(self, policies: Mapping[str, str], scope: Scope, size: float) -> Counters:
        window = self._window if policies.get("prefetch", "none") != "none" else 0
        return self._prepared.replayed({"eviction": "lru"} | policies, scope, size, window=window)


def _brought(counters: Counters) -> int:
    """Experts loaded, on demand and ahead."""
    totals = counters.totals()
    return totals["demand_bytes"] + totals["prefetch_bytes"]


if __name__ == "__main__":
    main()
