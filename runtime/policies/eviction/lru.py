"""Least recently used: the key whose last use is oldest goes first."""

from dataclasses import dataclass

import numpy as np

from runtime.policies.base import History, Now, Simple


@dataclass
class Lru(Simple):
    def order(self, keys: np.ndarray, history: History, now: Now) -> tuple[np.ndarray, ...]:
        return (history.last_use[keys],)
