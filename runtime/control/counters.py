"""Integer counters of requests per layer and pass, which depend on logical state alone."""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum, auto
from itertools import compress

import numpy as np

from artifacts.quantisation.widths import WIDTHS, Width, label
from artifacts.shape import FULL_BITS
from runtime.control.plan import Place
from runtime.control.pools import Partitions


class Counter(IntEnum):
    """`requests = hits + late + misses`; `misses = fetched + near + low + spared`, spared by
    stand-ins or dropping. Of the late, those `late_elsewhere` were computed near or on a resident
    replica, so that nothing waited for them. Prefetches are all loads that a step does not wait
    for when they are sent, those behind its misses too.

    `at_b_bits` counts the experts computed at that precision in any tier; all others were computed
    at full precision.

    The last three count tokens, in the first layer: drafts that were read, those that were
    accepted, and tokens that a pass of their own settled, since a wide pass rounds otherwise.
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
    LATE_ELSEWHERE = auto()
    AT_8_BITS = auto()
    AT_4_BITS = auto()
    AT_3_BITS = auto()
    AT_2_5_BITS = auto()
    AT_2_BITS = auto()
    AT_1_5_BITS = auto()
    AT_1_25_BITS = auto()
    AT_1_BIT = auto()
    AT_0_8_BITS = auto()
    AT_0_6_BITS = auto()
    AT_0_BITS = auto()
    DRAFTED = auto()
    ACCEPTED = auto()
    TIES = auto()


# Looked up once, as numbers: enum access is slow.
_REQUESTS = int(Counter.REQUESTS)
_HITS = int(Counter.HITS)
_LATE = int(Counter.LATE)
_MISSES = int(Counter.MISSES)
_FETCHED = int(Counter.FETCHED)
_OF_REQUESTS = (Counter.HITS, Counter.LATE, Counter.MISSES)
_OF_MISSES = (Counter.FETCHED, Counter.NEAR, Counter.LOW, Counter.SPARED)
_BY_DEVICE = (*(Counter.REQUESTS, *_OF_REQUESTS), Counter.EVICTIONS, Counter.PREFETCHES)
_BY_DEVICE += (Counter.DEMAND_BYTES, Counter.PREFETCH_BYTES)
AT_BITS = {bits: f"at_{label(bits)}_bit{'' if bits == 1 else 's'}" for bits in reversed(WIDTHS)}
_ALTERING = (*AT_BITS.values(), "replaced_ranks", "dropped_ranks")
_OF_BITS = {bits: Counter[name.upper()] for bits, name in AT_BITS.items()}


class Counters:
    """`passes`: one int64 table [F, L] a pass, F in the order of `Counter`; the last one is being
    written. When experts are spread over N devices, `on_devices` holds a table [F, N] for each
    pass. `catch_up` is called before passes are read together: a device that counts by itself may
    not have told of the last ones yet."""

    def __init__(self, num_layers: int, partitions: Partitions | None = None) -> None:
        self._num_layers = num_layers
        self._partitions = partitions
        self.is_spread = partitions is not None and partitions.count > 1
        self.passes: list[np.ndarray] = []
        self.on_devices: list[np.ndarray] = []
        self.catch_up: Callable[[], None] = _nothing

    def begin_pass(self) -> None:
        # `add` writes single cells of the array behind the table, in a third of the time that the
        # table takes.
        self._cells = array("q", bytes(8 * len(Counter) * self._num_layers))
        self.table = np.frombuffer(self._cells, np.int64).reshape(len(Counter), self._num_layers)
        self.passes.append(self.table)
        if self.is_spread:
            self.on_devices.append(np.zeros((len(Counter), self._partitions.count), np.int64))

    def fold(self) -> None:
        """Add up all passes so far, as if they had been one."""
        self.catch_up()
        if len(self.passes) > 1:
            self.passes[:] = [sum(self.passes)]
            self.on_devices[:] = [sum(self.on_devices)] if self.is_spread else []

    def truncate(self, num_passes: int) -> None:
        """Keep only the first `num_passes` passes."""
        del self.passes[num_passes:], self.on_devices[num_passes:]

    def add(self, counter: Counter, layer: int, amount: int) -> None:
        self._cells[counter * self._num_layers + layer] += amount

    def add_to_layers(
        self, counters: Iterable[Counter], first: int, num_layers: int, amount: int
    ) -> None:
        """Add `amount` to these counters in `num_layers` layers from `first` on."""
        for counter in counters:
            if num_layers == 1:
                self.add(counter, first, amount)
            else:
                self.table[counter, first : first + num_layers] += amount

    def spread(self, counter: Counter, keys: Sequence[int], amount: int = 1) -> None:
        """Add `amount` for each key on its device, beside what `add` counts per layer."""
        if self.is_spread:
            counts = self.on_devices[-1][counter]
            for key in keys:
                counts[self._partitions.of(key)] += amount

    def spread_requests(
        self, wanted: Sequence[int], late: Sequence[int], absent: Sequence[int]
    ) -> None:
        """Count requests per device, as `add_requests` counts them per layer."""
        self.spread(Counter.REQUESTS, wanted)
        self.spread(Counter.LATE, late)
        self.spread(Counter.MISSES, absent)
        self.spread(Counter.HITS, wanted)
        self.spread(Counter.HITS, (*late, *absent), -1)

    def by_device(self) -> list[dict[str, int]]:
        """Return one dictionary a device, summed over all passes; empty for a single device."""
        if not self.is_spread:
            return []
        total = sum(self.on_devices, np.zeros((len(Counter), self._partitions.count), np.int64))
        return [{c.name.lower(): int(column[c]) for c in _BY_DEVICE} for column in total.T]

    def sum(self, *, first_pass: int = 0) -> np.ndarray:
        """Return the table [F, L] summed over the passes from `first_pass` on."""
        self.catch_up()
        return sum(self.passes[first_pass:], np.zeros((len(Counter), self._num_layers), np.int64))

    def validate(self) -> None:
        """Raise AssertionError unless requests, misses and wasted bytes add up, in every pass and
        layer."""
        self.catch_up()
        for number, table in enumerate(self.passes):
            requests = table[list(_OF_REQUESTS)].sum(axis=0)
            misses = table[list(_OF_MISSES)].sum(axis=0)
            assert (table >= 0).all(), f"pass {number} counts less than nothing"
            assert (table[Counter.REQUESTS] == requests).all(), (
                f"pass {number}: {requests} of {table[0]} requests"
            )
            assert (table[Counter.MISSES] == misses).all(), f"pass {number}: {misses} of the misses"
            elsewhere = table[Counter.LATE_ELSEWHERE]
            assert (elsewhere <= table[_LATE]).all(), f"pass {number}: {elsewhere} of the late"
        num_spread = len(self.passes) if self.is_spread else 0
        assert len(self.on_devices) == num_spread, (
            f"{len(self.on_devices)} passes by device of {num_spread}"
        )
        for number, (table, by_device) in enumerate(
            zip(self.passes, self.on_devices, strict=False)
        ):
            spread, total = (counts[list(_BY_DEVICE)].sum(axis=1) for counts in (by_device, table))
            assert (spread == total).all(), f"pass {number}: devices do not add up"
        total = self.sum()
        wasted, prefetched = (
            int(total[counter].sum()) for counter in (Counter.WASTED_BYTES, Counter.PREFETCH_BYTES)
        )
        assert wasted <= prefetched, f"{wasted} bytes wasted of {prefetched} prefetched"

    def add_requests(self, layer: int, num: int, *, num_late: int, num_absent: int) -> None:
        """Count `num` requests of a layer; absent keys are counted as fetched."""
        cells = self._cells
        stride = self._num_layers
        cells[_REQUESTS * stride + layer] += num
        cells[_HITS * stride + layer] += num - num_late - num_absent
        if num_late:
            cells[_LATE * stride + layer] += num_late
        if num_absent:
            cells[_MISSES * stride + layer] += num_absent
            cells[_FETCHED * stride + layer] += num_absent

    def add_bits(self, layer: int, places: Iterable[Place]) -> None:
        """Count the precisions that experts are computed at; full precision is not counted."""
        for place in places:
            if place.bits != FULL_BITS:
                self.add(_OF_BITS[place.bits], layer, 1)

    def cells_of(self, bits: Sequence[Width]) -> np.ndarray:
        """Return the cells, int [L, E], in which `add_to` counts keys that are computed at these
        `bits` [L * E]."""
        rows = np.array([int(_OF_BITS[width]) for width in bits], np.int64).reshape(
            self._num_layers, -1
        )
        return rows * self._num_layers + np.arange(self._num_layers)[:, None]

    def add_to(self, cells: np.ndarray) -> None:
        """Count one more in each of these cells, as often as they are given."""
        np.add.at(self.table.reshape(-1), cells, 1)

    def by_layer(self, *, first_pass: int = 0) -> list[dict[str, int]]:
        """Return one dictionary a layer, summed over the passes from `first_pass` on."""
        return by_layer(self.sum(first_pass=first_pass))

    def hits_by_pass(self) -> list[tuple[int, int]]:
        """Return the hits and requests of each pass."""
        self.catch_up()
        return [(int(table[_HITS].sum()), int(table[_REQUESTS].sum())) for table in self.passes]

    def of_passes(self, chosen: Sequence[bool]) -> dict[str, int]:
        """Return the sums over the passes that are chosen."""
        self.catch_up()
        nothing = np.zeros((len(Counter), self._num_layers), np.int64)
        return totals(by_layer(sum(compress(self.passes, chosen), nothing)))

    def totals(self, *, first_pass: int = 0) -> dict[str, int]:
        return totals(self.by_layer(first_pass=first_pass))


def _nothing() -> None: ...


def by_layer(table: np.ndarray) -> list[dict[str, int]]:
    """Return one dictionary for each layer of a table [F, L]; a table of fractions gives
    fractions."""
    return [{c.name.lower(): column[c] for c in Counter} for column in table.T.tolist()]


def totals(layers: list[dict[str, int]]) -> dict[str, int]:
    """Sum over layers."""
    return {name: sum(layer[name] for layer in layers) for name in layers[0]}


def altered(counters: Mapping[str, int]) -> int:
    """Return the number of requests that were not computed as the full model computes them; 0 where
    the output is the same."""
    return sum(counters[name] for name in _ALTERING)


def is_exact(num_altered: int | None) -> bool | None:
    """Return whether the output is the full model's, up to rounding: no request was `altered`. A
    measured divergence is no proof of that: few tokens may hide what was altered. None where
    nothing was counted, as for another program."""
    return None if num_altered is None else num_altered == 0


def hit_rate(totals: dict[str, int]) -> float:
    """Return hits over requests, 0 when nothing was requested."""
    return totals["hits"] / totals["requests"] if totals["requests"] else 0.0
