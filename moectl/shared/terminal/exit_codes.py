"""Errors become one line on stderr and an exit code here, and nowhere else."""

import errno
import os
import shlex
import sys
from collections.abc import Callable, Sequence

from artifacts.errors import (
    BadInput,
    BadUsage,
    Incompatible,
    OutOfResources,
    Partly,
    Problem,
    shortage,
)
from moectl.shared.terminal.resuming import is_interruption, told
from moectl.shared.terminal.streams import lost_output

DONE = 0
BUG = 1
USAGE = 2
INPUT = 3
RESOURCES = 4
INCOMPATIBLE = 5
PARTLY = 6
INTERRUPTED = 130

_OURS = ("artifacts", "runtime", "profilers", "moectl")
_CODES = {
    BadUsage: USAGE,
    BadInput: INPUT,
    OutOfResources: RESOURCES,
    Incompatible: INCOMPATIBLE,
    Partly: PARTLY,
}


def exit_code_of(command: Callable[[], object], *, typed: Sequence[str] | None = None) -> int:
    """Run a command that returns or raises SystemExit, and return its exit code. `typed` are its
    arguments, by default those of the command line.

    A Problem is printed in one line. Any other exception but an interruption is a bug of moectl's:
    it passes through, so that Python prints its traceback and exits with 1.
    """
    code = _ended(command, shlex.join(["moectl", *(sys.argv[1:] if typed is None else typed)]))
    if (loss := lost_output()) and code == DONE:
        return _print_line(loss, RESOURCES)
    return code


def _ended(command: Callable[[], object], typed: str) -> int:
    try:
        command()
        return DONE
    except SystemExit as end:
        # Typer and rich raise SystemExit(1) when the reader of stdout ends early (`| head`), which
        # is no error.
        if isinstance(end.__context__, BrokenPipeError):
            return DONE
        # Typer raises SystemExit(130) for Ctrl-C and prints nothing.
        return (
            _print_line(told(end, typed), INTERRUPTED)
            if end.code == INTERRUPTED
            else _code(end.code)
        )
    except BrokenPipeError:
        return DONE
    except KeyboardInterrupt as interruption:
        return _print_line(told(interruption, typed), INTERRUPTED)
    except (Problem, MemoryError, OSError, RuntimeError, ModuleNotFoundError) as error:
        return _report(error)


def _report(error: Exception) -> int:
    """Print an error that the user can mend and return its code; raise any other again."""
    if isinstance(error, Problem):
        return _print_line(
            str(error), next(code for kind, code in _CODES.items() if isinstance(error, kind))
        )
    if lacking := shortage(error):
        return _print_line(str(lacking), RESOURCES)
    if isinstance(error, OSError) and (loss := lost_output()):
        return _print_line(loss, RESOURCES)
    if isinstance(error, PermissionError) and error.filename:
        return _print_line(
            f"{error.filename}: permission denied; give this user the right to use it", INPUT
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _print_line(
            (
                f"no space left to write {error.filename or 'stdout or a file'}; free some and "
                "try again"
            ),
            RESOURCES,
        )
    if is_interruption(error):
        return _print_line("interrupted", INTERRUPTED)
    if (
        isinstance(error, ModuleNotFoundError)
        and (error.name or "moectl").partition(".")[0] not in _OURS
    ):
        return _print_line(
            f"{error.name} is not installed: `moectl doctor` says what is missing", INCOMPATIBLE
        )
    raise error


def _print_line(text: str, code: int) -> int:
    try:
        print(f"moectl: {' '.join(text.split())}", file=sys.stderr, flush=True)
    except (
        OSError
    ):  # stderr is on the full disk, or its reader has ended: the exit code still reports the error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return code


def _code(code: object) -> int:
    if code is None:
        return DONE
    return code if isinstance(code, int) else BUG
