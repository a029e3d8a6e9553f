"""What happened to the requests: integer counters per layer and pass, decided by logical state alone."""

from array import array
from enum import IntEnum, auto

import numpy as np


class Counter(IntEnum):
    """`requests = hits + late + misses`; `misses = fetched + near + low + spared`, spared by stand-ins or dropping.

    `at_b_bits` are the experts computed at that precision, wherever; the others were computed in full.
    """

    def _generate_next_value_(name, start, count, last_values):
        return count

    REQUESTS = auto()
    HITS = auto()
    LATE = auto()
    MISSES = auto()
    FETCHED = auto()
    NEAR = auto()
    LOW = auto()
    SPARED = auto()
    REPLACED_RANKS = auto()
    DROPPED_RANKS = auto()
    COLLISIONS = auto()
    EVICTIONS = auto()
    PREFETCHES = auto()
    DEMAND_BYTES = auto()
    PREFETCH_BYTES = auto()
    WASTED_BYTES = auto()
    AT_4_BITS = auto()
    AT_3_BITS = auto()
    AT_2_BITS = auto()
    AT_1_BIT = auto()


_OF_REQUESTS = (Counter.HITS, Counter.LATE, Counter.MISSES)
_OF_MISSES = (Counter.FETCHED, Counter.NEAR, Counter.LOW, Counter.SPARED)
AT_BITS = {4: "at_4_bits", 3: "at_3_bits", 2: "at_2_bits", 1: "at_1_bit"}


class Counters:
    """`passes`: one [F, L] int64 table a pass, F in the order of `Counter`; the last one is being written."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.passes: list[np.ndarray] = []

    def begin_pass(self) -> None:
        # `add` writes single cells of the array below the table, in a third of the time that the table takes.
        self._cells = array("q", bytes(8 * len(Counter) * self._num_layers))
        self.table = np.frombuffer(self._cells, np.int64).reshape(len(Counter), self._num_layers)
        self.passes.append(self.table)

    def fold(self) -> None:
        """From here on all passes so far count as one."""
        if len(self.passes) > 1:
            self.passes[:] = [sum(self.passes)]

    def add(self, counter: Counter, layer: int, amount: int) -> None:
        self._cells[counter * self._num_layers + layer] += amount

    def sum(self, *, first_pass: int = 0) -> np.ndarray:
        """The table [F, L] of the passes from `first_pass` on together."""
        return sum(self.passes[first_pass:], np.zeros((len(Counter), self._num_layers), np.int64))

    def validate(self) -> None:
        """Raise AssertionError unless requests, misses and wasted bytes add up, in every pass and layer."""
        for number, table in enumerate(self.passes):
            requests, misses = table[list(_OF_REQUESTS)].sum(axis=0), table[list(_OF_MISSES)].sum(axis=0)
            assert (table >= 0).all(), f"pass {number} counts less than nothing"
            assert (table[Counter.REQUESTS] == requests).all(), f"pass {number}: {requests} of {table[0]} requests"
            assert (table[Counter.MISSES] == misses).all(), f"pass {number}: {misses} of the misses"
        total = self.sum()
        wasted, prefetched = (int(total[counter].sum()) for counter in (Counter.WASTED_BYTES, Counter.PREFETCH_BYTES))
        assert wasted <= prefetched, f"{wasted} bytes wasted of {prefetched} prefetched"

    def add_requests(self, layer: int, num: int, *, num_late: int, num_absent: int) -> None:
        """So many requests of a layer; what is absent is taken to be fetched."""
        cells, stride = self._cells, self._num_layers
        cells[Counter.REQUESTS * stride + layer] += num
        cells[Counter.HITS * stride + layer] += num - num_late - num_absent
        cells[Counter.LATE * stride + layer] += num_late
        cells[Counter.MISSES * stride + layer] += num_absent
        cells[Counter.FETCHED * stride + layer] += num_absent

    def by_layer(self, *, first_pass: int = 0) -> list[dict[str, int]]:
        """One dictionary a layer, summed over the passes from `first_pass` on."""
        return by_layer(self.sum(first_pass=first_pass))

    def totals(self, *, first_pass: int = 0) -> dict[str, int]:
        return totals(self.by_layer(first_pass=first_pass))


def by_layer(table: np.ndarray) -> list[dict[str, int]]:
    """One dictionary a layer of a table [F, L]."""
    return [{c.name.lower(): int(column[c]) for c in Counter} for column in table.T]


def totals(layers: list[dict[str, int]]) -> dict[str, int]:
    """The sum over layers."""
    return {name: sum(layer[name] for layer in layers) for name in layers[0]}


def hit_rate(totals: dict[str, int]) -> float:
    """Hits over requests; 0 when nothing was requested."""
    return totals["hits"] / totals["requests"] if totals["requests"] else 0.0
