"""Gain of `horizon` if it knew exactly which experts the next layers use: the worth that lookahead
can have for it.

    python -m tools.bench.traces.next_layers --traces FOLDER
    python -m tools.bench.traces.next_layers --traces FOLDER --only mixtral-8x7b --write docs/traces.md

Traces, sizes and `gap closed` are as in `tools.bench.traces.real`. Where `horizon` is told a
layer's next visit, an expert that is used then is expected at that visit. Any other expert is
expected a pass later than `horizon` says.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, Step
from runtime.policies.eviction.belady import Belady
from runtime.policies.eviction.horizon import Horizon
from runtime.policies.presets import Scope
from tools.bench.performance import Table
from tools.bench.traces.real import (
    BOUND,
    OURS,
    Cell,
    Prepared,
    RealTrace,
    cell_texts,
    named,
    options,
    present,
    tabulate,
)

PUBLISHED = ("lru", "lfu", "lcp", "fld", "activation")
PLACES = (
    (Scope.LAYER, 0.25),
    (Scope.LAYER, 0.5),
    (Scope.GLOBAL, 0.125),
    (Scope.GLOBAL, 0.25),
    (Scope.GLOBAL, 0.5),
)
_TOGETHER = (
    "qwen1.5-moe-together",
    "bundled-model",
)  # where a pass has several tokens, and every layer many experts


@dataclass
class Told(Horizon):
    """Policy `horizon` that is told the next visits of the next `layers` layers."""

    layers: int = 0

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        super().prepare(shape, artefacts)
        self._near = self.ranks[0]
        self.ranks = None
        self._future = Belady()
        self._future.prepare(shape, artefacts)

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        super().used(keys, step, now)
        self._future.used(keys, step, now)

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        num_layers = self._shape.num_layers
        visit = now.step + 1 + (keys // self._shape.num_experts - now.layer - 1) % num_layers
        next_use = -self._future.order(keys, now)[0]
        later = np.where(next_use == visit, visit, num_layers - self._near[keys])
        return (-np.where(visit <= now.step + self.layers, later, -self._near[keys]),)


def main() -> None:
    chosen = options(__doc__).parse_args()
    found = [(real, path) for real, path in present(chosen) if real.name not in _TOGETHER]
    command = f"python -m tools.bench.traces.next_layers --traces FOLDER --tokens {chosen.tokens}"
    tabulate(chosen, found, lambda *one: [measured(*one, chosen.tokens)], command, "-next-layers")


def measured(real: RealTrace, path: Path, tokens: int) -> Table:
    """Return the share of the gap that `horizon` closes, by what it is told."""
    prepared = Prepared(real, path, tokens)
    num_layers = prepared.shape.num_layers
    places = [place for place in PLACES if prepared.has_choice(*place)]
    told = {"nothing": 0, "half a pass": num_layers // 2, "the next pass": num_layers}
    rows = {name: [] for name in told}
    for place in places:
        found = {
            name: Cell.of(prepared.replayed({"eviction": name}, *place))
            for name in (*PUBLISHED, BOUND)
        }
        for name, layers in told.items():
            found[OURS] = Cell.of(prepared.replayed({}, *place, eviction=Told(layers)))
            texts = cell_texts(found, prepared.units, prepared.weights)
            rows[name].append(f"{texts[OURS].split()[0]}, {texts['gap closed']}")
    columns = ("`horizon` is told", *(named(*place) for place in places))
    return Table(
        real.told, columns, [(name, *cells) for name, cells in rows.items()], "hit rate, gap closed"
    )


if __name__ == "__main__":
    main()
