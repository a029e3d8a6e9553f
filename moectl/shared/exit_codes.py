"""The one place where an error becomes a line on stderr and an exit code (DESIGN 10)."""

import errno
import os
import sys
from collections.abc import Callable

from artifacts.errors import BadInput, BadUsage, Incompatible, OutOfResources, Partly, Problem

DONE, BUG, USAGE, INPUT, RESOURCES, INCOMPATIBLE, PARTLY, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 130

_OURS = ("artifacts", "runtime", "profilers", "moectl")
_CODES = {BadUsage: USAGE, BadInput: INPUT, OutOfResources: RESOURCES, Incompatible: INCOMPATIBLE, Partly: PARTLY}


def exit_code_of(command: Callable[[], object]) -> int:
    """Run a command that ends by returning or by SystemExit, and give its exit code.

    A Problem is told in one line. What is neither a Problem nor an interruption is our own bug and passes through, so
    that Python prints its traceback and exits with 1.
    """
    try:
        command()
        sys.stdout.flush()
        return DONE
    except SystemExit as end:
        # Typer and rich turn a reader that went away (`| head`) into SystemExit(1); nothing went wrong.
        if isinstance(end.__context__, BrokenPipeError):
            return _quiet_end()
        # Typer turns Ctrl-C into SystemExit(130) and says nothing.
        return _tell("interrupted", INTERRUPTED) if end.code == INTERRUPTED else _code(end.code)
    except BrokenPipeError:
        return _quiet_end()
    except KeyboardInterrupt:
        return _tell("interrupted", INTERRUPTED)
    except (Problem, MemoryError, OSError, RuntimeError, ModuleNotFoundError) as error:
        return _told(error)


def _told(error: Exception) -> int:
    """Tell what a user can mend; raise the rest again."""
    if isinstance(error, Problem):
        return _tell(str(error), next(code for kind, code in _CODES.items() if isinstance(error, kind)))
    if isinstance(error, MemoryError) or _is_torchs_out_of_memory(error):
        return _tell("not enough memory; use a smaller model, batch or budget", RESOURCES)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _tell(f"no space left to write {error.filename or 'a file'}; free some and try again", RESOURCES)
    # DuckDB's way of saying that Ctrl-C reached one of its queries.
    if isinstance(error, RuntimeError) and "Query interrupted" in str(error):
        return _tell("interrupted", INTERRUPTED)
    if isinstance(error, ModuleNotFoundError) and (error.name or "moectl").partition(".")[0] not in _OURS:
        return _tell(f"{error.name} is not installed: `moectl doctor` says what is missing", INCOMPATIBLE)
    raise error


def _is_torchs_out_of_memory(error: Exception) -> bool:
    """Of a GPU it has a class of its own, of a CPU it is a RuntimeError; torch is not imported to see."""
    text = str(error)
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator: can't allocate memory" in text


def _tell(text: str, code: int) -> int:
    try:
        print(f"moectl: {' '.join(text.split())}", file=sys.stderr, flush=True)
    except OSError:  # stderr is a file on the disk that is full, or its reader went away: the code still tells
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return code


def _code(code: object) -> int:
    if code is None:
        return DONE
    return code if isinstance(code, int) else BUG


def _quiet_end() -> int:
    # Python flushes stdout once more at its end and would complain there.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return DONE
