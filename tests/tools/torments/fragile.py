"""A torment that breaks in several ways, for the tests of what runs it."""

import os
import random
import time
from pathlib import Path

from tools.torments import cases


class Fragile:
    """Its second case breaks a promise, its third the process."""

    classes = (13, 14)
    share = 1.0

    def __init__(self, ground: Path) -> None:
        self._tried = 0

    def one(self, rng: random.Random) -> str:
        self._tried += 1
        if self._tried == 2:
            time.sleep(0.2)
            raise cases.Lost("14: a promise")
        if self._tried == 3:
            os.abort()
        return f"{rng.random()}"


class Bad(Fragile):
    def __init__(self, ground: Path) -> None:
        raise ValueError("no ground to stand on")
