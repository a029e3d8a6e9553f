"""Errors that are not bugs of moectl: each carries its remedy in one line."""

from traceback import format_exception

_LONGEST = 200  # characters of another program's message within one of our lines
_MEMORY = "not enough memory; use a smaller model, batch or budget"
_SHORTAGES = {  # in an error of the system or of another program, and our line
    "Too many open files": (
        "this process may not open more files; raise its limit, as with ulimit -n"
    ),
    "can't start new thread": (
        "no more threads may be started; raise the limit on processes or memory (ulimit -u, -v)"
    ),
    "Resource temporarily unavailable": (
        "no more processes may be started; raise the limit (ulimit -u)"
    ),
    "No usable temporary directory": (
        "no temporary folder can be written; set TMPDIR to one that can"
    ),
    "Cannot allocate memory": _MEMORY,
    "DefaultCPUAllocator: can't allocate memory": _MEMORY,
    "bad allocation": _MEMORY,
}


class Problem(Exception):
    """Base of every error a user can cause or mend; its text is the line that the user reads."""


class BadUsage(Problem):
    """An option or an argument that cannot be understood (exit code 2)."""


class BadInput(Problem):
    """A model, a data file or a prompt that cannot be used (exit code 3)."""


class OutOfResources(Problem):
    """Not enough disk or memory, or a file that another process holds (exit code 4)."""


class Incompatible(Problem):
    """An artefact of another model, or of another version of the store (exit code 5)."""


class Partly(Problem):
    """Some of the work could not be done; the rest is done and kept (exit code 6)."""


def first_line(error: BaseException) -> str:
    """The first line of another program's error message, with the next one where it ends in a
    colon, shortened; the name of the error where it has no message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


def detached(error: Exception) -> Exception:
    """Return an error that can be kept: its traceback is told in a note. The frames of one would
    hold tensors and, by way of their callers, the error itself, until Python's collector finds
    that."""
    told = "".join(format_exception(error))
    error.__traceback__ = error.__cause__ = error.__context__ = None
    error.add_note(told)
    return error


def shortage(error: BaseException) -> OutOfResources | None:
    """The error that a user sees for the system's or another program's one that means that this
    process lacks something; None for one that means anything else."""
    # torch's, of a GPU
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return OutOfResources(_MEMORY)
    return next(
        (OutOfResources(ours) for theirs, ours in _SHORTAGES.items() if theirs in str(error)), None
    )
