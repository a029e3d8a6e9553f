"""A spinner or a bar on stderr while the user waits. Nothing here imports torch."""

import sys
from collections.abc import Callable, Iterable
from time import perf_counter
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TransferSpeedColumn,
)

from runtime.model.files.read_bytes import READ


def _read_nbytes() -> int:
    return READ.nbytes


class Waiting:
    """A spinner on a terminal, which `end` takes away, with a bar where there are `nbytes` to come,
    of which `done` tells the number so far, by default those read from checkpoints; without a
    terminal a line, unless `is_quiet`. Knows the seconds since it began."""

    def __init__(
        self,
        what: str,
        *,
        nbytes: int = 0,
        is_quiet: bool = False,
        done: Callable[[], int] = _read_nbytes,
    ) -> None:
        self._begin_s = perf_counter()
        self._bar = None
        console = Console(stderr=True, highlight=False)
        if console.is_terminal:
            columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
            if nbytes:
                columns += [BarColumn(16), DownloadColumn(binary_units=True), TransferSpeedColumn()]
            self._bar = _Bytes(done, *columns, console=console, transient=True)
            self._bar.add_task(what, total=nbytes or None)
            self._bar.start()
        elif not is_quiet:
            print(what, file=sys.stderr, flush=True)

    def __enter__(self) -> "Waiting":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> float:
        """Take the spinner away, and return the seconds waited. May be called again."""
        if self._bar:
            self._bar.stop()
        return perf_counter() - self._begin_s


class _Bytes(Progress):
    """A bar that asks, whenever it is drawn, how many bytes came since it was made."""

    def __init__(
        self, done: Callable[[], int], *columns: ProgressColumn, console: Console, transient: bool
    ) -> None:
        self._done = done
        self._already = done()
        super().__init__(*columns, console=console, transient=transient)

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            self.update(task.id, completed=min(self._done() - self._already, task.total or 0))
        return super().get_renderables()
