"""Interruptions by Ctrl-C: the code that does the work says what is kept, and the line that ends
the command tells it."""

from collections.abc import Iterator
from contextlib import contextmanager


class Interrupted(KeyboardInterrupt):
    """Ctrl-C within work that the same command can resume. `kept` says what it takes up; empty if
    it keeps nothing."""

    def __init__(self, kept: str) -> None:
        super().__init__(kept)
        self.kept = kept


@contextmanager
def resumable(kept: str = "") -> Iterator[None]:
    """Let an interruption within say what is kept, as `finished samples are kept`. Without `kept`
    it says that nothing is kept."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        raise Interrupted(kept) from interruption
    except RuntimeError as error:
        if is_interruption(error):
            raise Interrupted(kept) from error
        raise


def is_interruption(error: BaseException) -> bool:
    """Return whether DuckDB raised the error because Ctrl-C ended one of its queries."""
    return isinstance(error, RuntimeError) and "Query interrupted" in str(error)


def told(error: BaseException, typed: str) -> str:
    """The line about an interruption that led to this error; `typed` is the command."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Interrupted):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return "interrupted"
    return (
        f"interrupted: {cause.kept}; to go on: {typed}"
        if cause.kept
        else "interrupted: nothing is kept"
    )
