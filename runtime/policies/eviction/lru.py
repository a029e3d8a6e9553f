"""Least recently used: the key whose last use is oldest goes first."""

from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step, check_choice
from runtime.policies.eviction.shared import cells_and_view, never_used


@dataclass
class Lru(SimpleEviction):
    """Evicts the key that was used longest ago. With `stamp` `load` a prefetched key counts as used
    when it is sent for. With `use` it counts only once a step has used it, so that unused
    prefetches are evicted first."""

    stamp: str = "use"

    def __post_init__(self) -> None:
        check_choice("lru", "stamp", self.stamp, "use", "load")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape
        self._cells, self._last_use = cells_and_view(never_used(shape))
        self._queues: list[dict[int, None]] = []
        self._may_have_changed = False
        self._number = -1  # of the step that used keys last

    @property
    def last_use(self) -> np.ndarray:
        """Number of the step that last used each key, -1 for none: a view, which may be written to
        before the next step."""
        self._may_have_changed = True
        return self._last_use

    def queues(self) -> list[dict[int, None]] | None:
        """Return for each layer its keys in eviction order, kept up to date from here on; None
        where loads are stamped."""
        if self.stamp == "load":  # a key that is sent for and one that is used may be stamped alike
            return None
        num_keys = self._shape.num_keys
        size = self._shape.num_experts
        self._queues = [
            dict.fromkeys(range(first, first + size)) for first in range(0, num_keys, size)
        ]
        self._sort()
        return self._queues

    def _sort(self) -> None:
        """Order the queues by last use."""
        self._may_have_changed = False
        for queue in self._queues:
            keys = sorted(sorted(queue), key=self._cells.__getitem__)
            queue.clear()
            queue.update(dict.fromkeys(keys))

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        cells = self._cells
        number = now.step
        if not self._queues:
            for key in keys:
                cells[key] = number
            return
        if self._may_have_changed:
            self._sort()
        queue = self._queues[step.layer]
        if number == self._number:  # drafts were accepted: several tokens use keys at one step
            keys = {*keys, *takewhile(lambda key: cells[key] == number, reversed(queue))}
        self._number = number
        for key in sorted(keys):  # equally old ones go by the lower key
            cells[key] = number
            queue[key] = queue.pop(key)

    def prefetched(self, keys: list[int], now: Now) -> None:
        if self.stamp == "load":
            cells = self._cells
            number = now.step
            for key in keys:
                cells[key] = number

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        return (self._last_use[keys],)
