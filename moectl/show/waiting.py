"""Messages of a command on stderr while its user waits for a model. Nothing here imports torch."""

import sys
from time import perf_counter
from types import TracebackType

from rich.console import Console
from rich.status import Status

from artifacts.common.untrusted import existing, readable
from moectl.bundled import demo_model
from moectl.show.render import human_bytes
from runtime.model.files.locate import check_name, locate, weight_files


class Waiting:
    """A spinner on a terminal, which `end` takes away; without a terminal a line, unless
    `is_quiet`. Knows the seconds since it began."""

    def __init__(self, what: str, *, is_quiet: bool = False) -> None:
        self._begin_s = perf_counter()
        self._spinner = None
        console = Console(stderr=True, highlight=False)
        if console.is_terminal:
            self._spinner = Status(what, console=console)
            self._spinner.start()
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
        if self._spinner:
            self._spinner.stop()
        return perf_counter() - self._begin_s


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
    size = human_bytes(sum(path.stat().st_size for path in weight_files(found) if readable(path)))
    what = name or "the bundled model"
    return Waiting(f"Loading {what}: {size}, preset {preset}, budget {budget}", is_quiet=is_quiet)
