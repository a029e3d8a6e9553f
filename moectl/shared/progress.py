"""Progress on stderr: bars, and the phases of a long command."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(what: str, *, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes how much is done and how much there is. Without a terminal nothing is drawn."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance


class Phases:
    """The phases of a long command: each is told on stderr when it begins, with the seconds since the first began, and
    its own `seconds` are kept for the receipt. They are told without a terminal too, unless `is_quiet`."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        self._begun: list[tuple[str, float]] = []

    def begin(self, name: str) -> None:
        """End the present phase and begin another."""
        self._begun.append((name, perf_counter()))
        if not self._is_quiet:
            print(f"{self.elapsed_s:6.0f} s  {name}", file=sys.stderr, flush=True)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first phase began, 0 before it."""
        return perf_counter() - self._begun[0][1] if self._begun else 0.0

    def seconds(self) -> dict[str, float]:
        """The seconds of each phase, by name, the present one up to now."""
        ends = [*(begin_s for _, begin_s in self._begun[1:]), perf_counter()]
        return {name: end_s - begin_s for (name, begin_s), end_s in zip(self._begun, ends, strict=False)}
