"""A server of the bundled model in a process of its own, and texts and answers to hold beside
it."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from profilers.text.corpus import documents


def long_texts() -> list[str]:
    """Return held-out texts of more than 200 characters."""
    found = (one.text for one in islice(documents("builtin:held-out"), 200))
    return [text for text in found if len(text) > 200]


@contextmanager
def serving(
    model: Path, *, preset: str, batch: int, budget: str = "25%", experts: str = "auto"
) -> Iterator[tuple[subprocess.Popen, int]]:
    """Serve on one thread; yield the process and its port. What it said last is printed."""
    own = ("--preset", preset, "--budget", budget, "--batch", str(batch))
    alike = ("--experts", experts, "--threads", "1", "--port", "0")
    command = [sys.executable, "-m", "moectl", "serve", str(model), *own, *alike]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            told = [process.stderr.readline()]
            while told[-1] and "/v1 for clients" not in told[-1]:
                told.append(process.stderr.readline())
            assert told[-1], "".join(told)
            yield process, int(re.search(r"http://[0-9.]+:(\d+)", told[-1])[1])
        finally:
            process.send_signal(signal.SIGTERM)
            print(process.stderr.read(), end="", file=sys.stderr)
    assert process.returncode == 0, f"the server ended with {process.returncode}"
