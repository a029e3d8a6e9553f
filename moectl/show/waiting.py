"""Messages of a command on stderr while its user waits for a model. Nothing here imports torch."""

import sys
from collections.abc import Iterable
from pathlib import Path
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

from artifacts.common.untrusted import existing, readable
from moectl.bundled import demo_model
from moectl.show.render import human_bytes
from runtime.model.files.locate import check_name, locate, weight_files
from runtime.model.files.read_bytes import READ


class Waiting:
    """A spinner on a terminal, which `end` takes away, with a bar of the bytes read so far where
    there are `nbytes` to read; without a terminal a line, unless `is_quiet`. Knows the seconds
    since it began."""

    def __init__(self, what: str, *, nbytes: int = 0, is_quiet: bool = False) -> None:
        self._begin_s = perf_counter()
        self._bar = None
        console = Console(stderr=True, highlight=False)
        if console.is_terminal:
            columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
            if nbytes:
                columns += [BarColumn(16), DownloadColumn(binary_units=True), TransferSpeedColumn()]
            self._bar = _Reading(*columns, console=console, transient=True)
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


class _Reading(Progress):
    """A bar that asks, whenever it is drawn, how much has been read since it was made."""

    def __init__(self, *columns: ProgressColumn, console: Console, transient: bool) -> None:
        self._already = READ.nbytes
        super().__init__(*columns, console=console, transient=transient)

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            done = READ.nbytes - self._already
            self.update(task.id, completed=min(done, task.total or 0))
        return super().get_renderables()


def loading(name: str | None, *, preset: str, budget: str, is_quiet: bool = False) -> Waiting:
    """Begin to wait for a model, None for the bundled one, after a look at its files; of a model of
    the hub they are downloaded now.

    Raises BadInput for a name that is no model's.
    """
    if name is None or existing(name):
        found = locate(name or str(demo_model()))
    else:
        check_name(name)
        with Waiting(f"Looking for {name} on the hub", is_quiet=is_quiet):
            found = locate(name)
    nbytes = _nbytes(found)
    what = f"Loading {name or 'the bundled model'}: {human_bytes(nbytes)}"
    return Waiting(f"{what}, preset {preset}, budget {budget}", nbytes=nbytes, is_quiet=is_quiet)


def reading(name: str) -> Waiting:
    """Begin to wait for a model of which the user has been told: without a terminal nothing is
    said."""
    return Waiting(f"Reading {name}", nbytes=_nbytes(locate(name)), is_quiet=True)


def _nbytes(found: Path) -> int:
    """Return the bytes of a model's weights."""
    return sum(path.stat().st_size for path in weight_files(found) if readable(path))
