"""Least-Stale (SpecMD): what this pass has not touched goes first, lower layers before higher, older uses before
newer."""

from dataclasses import dataclass

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Artefacts, History, Now, Simple


@dataclass
class LeastStale(Simple):
    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._num_experts = shape.num_experts

    def order(self, keys: np.ndarray, history: History, now: Now) -> tuple[np.ndarray, ...]:
        is_current = history.last_pass[keys] == now.pass_index
        return is_current, keys // self._num_experts, history.last_use[keys]
