"""Progress on stderr: numbered phases, one line of how much is done, and the time left for the
whole."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from threading import Timer
from time import perf_counter
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn
from rich.table import Column
from rich.text import Text

EVERY_S = 60.0  # between plain lines within a phase
WAIT_S = 2.0  # that a phase lasts before it is told; a command that fails at once says only why
_FEW = 2  # phases of a command that is mostly one
# time and share of the work after which it can be told how long the rest takes
_SOONEST_S = 3.0
_LEAST = 0.02

Advance = Callable[[float, float], None]
"""Takes how much of the present phase is done, and how much there is."""


class Phases:
    """Phases of a long command; `shares` are their approximate shares of its time.

    On a terminal one line shows the phase, the share of the whole that is done and the time left.
    Without a terminal each phase that lasts is told, or every phase `at_once`, with the seconds
    from the first to its begin, and again every minute. A command of one or two phases tells
    nothing before its first minute is over; with `is_quiet` no phase is told. `limit_s` is the time
    limit of the whole. Phases within a phase only move it.
    """

    def __init__(
        self, *shares: float, limit_s: float = inf, is_quiet: bool = False, at_once: bool = False
    ) -> None:
        self._shares = shares
        self._limit_s = limit_s
        self._is_quiet = is_quiet
        self._wait_s = 0.0 if at_once else WAIT_S
        self._begun: list[tuple[str, float]] = []
        self.note = ""  # beside the name of the present phase
        self._done = 0.0
        self._told_s = 0.0
        self._bar: Progress | None = None
        self._around: Phases | None = None
        self._timer: Timer | None = None

    def __enter__(self) -> Self:
        console = Console(stderr=True)
        self._around = _PRESENT.get()
        if self._around is None and console.is_terminal:
            name = TextColumn(
                "{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")
            )
            columns = (name, BarColumn(16), TaskProgressColumn(), _TimeLeft(self))
            self._bar = Progress(*columns, console=console, transient=True, refresh_per_second=4)
            self._bar.add_task("beginning", total=1.0)
            self._bar.start()
        self._token = _PRESENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _PRESENT.reset(self._token)
        if self._timer:
            self._timer.cancel()
        if self._bar:
            self._bar.stop()

    def begin(self, name: str) -> Advance:
        """End the present phase and begin another; return the function that moves it."""
        self._begun.append((name, perf_counter()))
        self._done = 0.0
        assert len(self._begun) <= len(self._shares), f"more phases than shares of time: {name}"
        if self._around:
            self._around.advance(self.done, 1.0)
        elif self._bar:
            self._show()
        elif len(self._shares) > _FEW:
            self._tell_soon()
        return self.advance

    def advance(self, done: float, total: float) -> None:
        """Move the present phase."""
        self._done = min(1.0, done / total) if total else 0.0
        if self._around:
            self._around.advance(self.done, 1.0)
        elif self._bar:
            self._show()
        elif self.elapsed_s - self._told_s >= EVERY_S:
            self._tell(
                f"{self._label}: {self.done:.0%}{self.left and ', '}{self.left}", self.elapsed_s
            )

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first phase began, 0 before it."""
        return perf_counter() - self._begun[0][1] if self._begun else 0.0

    @property
    def left_s(self) -> float:
        """Seconds that the limit leaves to the present phase, so that later ones have theirs; below
        0 when late."""
        return self._limit_s * self._share(len(self._begun)) - self.elapsed_s

    def is_late(self) -> bool:
        """Return whether the present phase has used up its time."""
        return self.left_s < 0

    @property
    def done(self) -> float:
        """The share of the whole that is done."""
        before = self._share(max(0, len(self._begun) - 1))
        return before + self._done * (self._share(len(self._begun)) - before)

    @property
    def left(self) -> str:
        """Time left for the whole, in words; empty where nothing can be said yet."""
        elapsed_s = self.elapsed_s
        done = self.done
        left_s = (
            elapsed_s * (1 - done) / done if elapsed_s >= _SOONEST_S and done >= _LEAST else inf
        )
        left_s = min(left_s, max(0.0, self._limit_s - elapsed_s))
        if left_s == inf:
            return ""
        return (
            f"about {left_s:.0f} s left" if left_s < 99.5 else f"about {left_s / 60:.0f} min left"
        )

    def seconds(self) -> dict[str, float]:
        """The seconds of each phase, by name, the present one up to now."""
        ends = [*(begin_s for _, begin_s in self._begun[1:]), perf_counter()]
        return {
            name: end_s - begin_s for (name, begin_s), end_s in zip(self._begun, ends, strict=False)
        }

    @property
    def _label(self) -> str:
        number = f"{len(self._begun)}/{len(self._shares)} " if len(self._shares) > 1 else ""
        return number + self._begun[-1][0] + (self.note and f": {self.note}")

    def _share(self, count: int) -> float:
        return sum(self._shares[:count]) / sum(self._shares)

    def _show(self) -> None:
        for task in self._bar.task_ids:
            self._bar.update(task, description=self._label, completed=self.done)

    def _tell_soon(self) -> None:
        """Tell the phase that begins, if it lasts."""
        if self._timer:
            self._timer.cancel()
        if not self._wait_s:
            self._tell(self._label, self.elapsed_s)
        elif self._wait_s < inf:
            self._timer = Timer(self._wait_s, self._tell, (self._label, self.elapsed_s))
            self._timer.daemon = True
            self._timer.start()

    def _tell(self, text: str, at_s: float) -> None:
        self._told_s = at_s
        if not self._is_quiet:
            print(f"{at_s:6.0f} s  {text}", file=sys.stderr, flush=True)


# a terminal has one line of progress
_PRESENT: ContextVar[Phases | None] = ContextVar("phases", default=None)


class _TimeLeft(ProgressColumn):
    def __init__(self, phases: Phases) -> None:
        super().__init__(Column(no_wrap=True))
        self._phases = phases

    def render(self, task: Task) -> Text:
        return Text(self._phases.left)


@contextmanager
def progress_bar(what: str, *, unit: str) -> Iterator[Advance]:
    """Yield a function that moves the present phase. If there is none, begin the only phase of a
    command, named `what` and `unit`."""
    if phases := _PRESENT.get():
        yield phases.advance
        return
    with Phases(1.0) as phases:
        advance = phases.begin(f"{what} {unit}")
        yield advance
