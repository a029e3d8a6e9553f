"""Torments of moectl, one file each, found by name; `tools.torments.torture` runs them.

A torment prepares a folder once; each case then draws a fault, causes it, and checks moectl's
promises. A case depends on its generator alone, so that its seed repeats it.
"""

import random
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import ClassVar, Protocol


class Lost(Exception):
    """A promise was broken. The message begins with the fault's class (`13: ...`) where a torment
    has several."""


class Torment(Protocol):
    """`classes` are the numbers of tests/faults, `share` is its weight in the minutes."""

    classes: ClassVar[tuple[int, ...]]
    share: ClassVar[float]

    def __init__(self, ground: Path) -> None:
        """Prepare what all cases need in an empty folder."""

    def one(self, rng: random.Random) -> str:
        """One case: the fault it met, `13: truncated gzip` where there are several classes.

        Raises:
            Lost: A promise was broken. Any other error that leaves a case is a loss as well.
        """


def names() -> list[str]:
    return sorted(module.name for module in iter_modules(__path__))


def load(name: str) -> type[Torment]:
    """The class of a file: `disk_full` holds `DiskFull`."""
    return getattr(import_module(f"{__name__}.{name}"), name.title().replace("_", ""))


def class_of(torment: type[Torment], fault: str) -> int:
    number, colon, _ = fault.partition(":")
    return int(number) if colon and number.isdigit() else torment.classes[0]
