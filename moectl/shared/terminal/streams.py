"""Standard streams as commands find them: closed ones, a terminal that goes away, and text that
they cannot hold."""

import os
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path


def prepare_streams() -> None:
    """Make stdout and stderr usable whatever they are, and a terminal that goes away an
    interruption.

    Where the locale makes Python read names and arguments as ASCII, the process starts again in
    UTF-8 mode: text and file names are UTF-8 whatever the locale says.
    """
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        os.execve(
            sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONUTF8": "1"}
        )
    _fill_closed()
    if isinstance(sys.stdout, TextIOWrapper):
        # a terminal that is not UTF-8 shows `?` instead of raising
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.default_int_handler)


def _fill_closed() -> None:
    """Connect closed streams to /dev/null: the next file to be opened would get a stream's number,
    and with it what libraries print. `sys.stdin` stays None, so that a command can refuse to wait
    for text."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        with suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
        if name != "stdin" and getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115


def lost_output() -> str | None:
    """Return the reason why stdout could not take all of its text, None if it did. The end of a
    reader (`| head`) is no loss."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # At its end Python flushes stdout once more, which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            return f"stdout cannot be written: {error.strerror}"
    return None
