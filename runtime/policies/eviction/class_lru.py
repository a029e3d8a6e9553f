"""Class LRU (llama.cpp's cache of experts since b12170): the oldest use goes first, and an age
counts for less, the more often an expert was used lately."""

from dataclasses import dataclass
from math import frexp, inf

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step
from runtime.policies.eviction.shared import cells_and_view, never_used


@dataclass
class ClassLru(SimpleEviction):
    """Evicts the key with the largest age / 2^class.

    An age is the number of tokens that the key's layer has had since the last use. A use adds 1 to
    the key's count, which halves every `half_life` tokens; the class, set at that use, is
    floor(log2(count)), below `num_classes`. Ties go by the lower class, then by the older step. A
    step of more than `tokens` tokens is not noted: it bypasses the cache there (`share:tokens=32`).

    This is a reading: the release notes of b12170 and the first comment of src/llama-moe-cache.cpp
    at c4fb5796 give classes, half-life, the clock of each layer and the rule for the victim, but
    not its ties.
    """

    half_life: float = 128.0
    num_classes: int = 8
    tokens: float = inf

    def __post_init__(self) -> None:
        if not (self.half_life > 0 and self.num_classes >= 1):
            raise BadUsage(
                f"class_lru needs half_life > 0 and num_classes >= 1, not {self.half_life} and "
                f"{self.num_classes}"
            )

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._layers = np.arange(shape.num_keys) // shape.num_experts
        self._clocks = np.zeros(shape.num_layers, np.int64)  # tokens of each layer
        self._step_cells, self._steps = cells_and_view(never_used(shape))
        self._use_cells, self._used_at = cells_and_view(np.zeros(shape.num_keys, np.int64))
        self._class_cells, self._classes = cells_and_view(np.zeros(shape.num_keys, np.int64))
        self._counts = np.zeros(shape.num_keys).tolist()

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        if len(step.selected) > self.tokens:
            return
        clock = int(self._clocks[step.layer]) + len(step.selected)
        self._clocks[step.layer] = clock
        for key in keys:
            age = clock - self._use_cells[key]
            count = self._counts[key] * 2 ** (-age / self.half_life) + 1
            self._counts[key] = count
            self._class_cells[key] = min(frexp(count)[1], self.num_classes) - 1
            self._use_cells[key] = clock
            self._step_cells[key] = now.step

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        ages = self._clocks[self._layers[keys]] - self._used_at[keys]
        classes = self._classes[keys]
        return (-ages / 2.0**classes, classes, self._steps[keys])
