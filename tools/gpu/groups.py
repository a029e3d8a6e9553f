"""Groups of measurements, each in a process of its own with its own limit: an error that spoils a
CUDA context, or a kernel that never ends, costs one group. Each result is a line of JSON, written
as it comes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import IO

from tools import ROOT

_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "0",
}
_LAST_LINES = 5  # of what a group that fails said, kept as its reason


@dataclass(frozen=True, slots=True)
class Group:
    """A module to run with `arguments`; it prints lines of JSON, and anything else for readers. It
    is ended after `limit_s` seconds."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    limit_s: float = 60.0


def tell(**figures: object) -> None:
    """Print a line of JSON, as `run_group` reads it."""
    print(json.dumps(figures), flush=True)


def run_groups(groups: Sequence[Group], out: Path, *, limit_s: float) -> list[dict]:
    """Run the groups one after another within `limit_s` seconds, and append each line to `out` as
    it comes, with the name of its group. The last line of a group has `ended`: `well`, or why
    not."""
    begin_s = time.monotonic()
    lines = []
    with out.open("a", encoding="utf-8") as file:

        def note(line: dict) -> None:
            lines.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()

        for group in groups:
            left_s = limit_s - (time.monotonic() - begin_s)
            if left_s <= 0:
                note({"group": group.name, "ended": "not begun: out of time", "seconds": 0.0})
            else:
                run_group(group, min(group.limit_s, left_s), note)
    return lines


def run_group(group: Group, limit_s: float, note: Callable[[dict], None]) -> None:
    """Run one group and `note` its lines; its process and all that it started end with it."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", group.module, *group.arguments]
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "errors": "replace",
    }
    begin_s = time.monotonic()
    late = []
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | _OFFLINE | {"PYTHONPATH": path},
        start_new_session=True,
        **pipes,
    )

    def end() -> None:
        late.append(True)
        os.killpg(process.pid, signal.SIGKILL)

    timer = Timer(limit_s, end)
    timer.start()
    try:
        said = _read(process.stdout, lambda line: note({"group": group.name} | line))
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    ended = (
        f"after its limit of {limit_s:.0f} s"
        if late
        else "well"
        if code == 0
        else f"exit code {code}: {said}"
    )
    note({"group": group.name, "ended": ended, "seconds": round(time.monotonic() - begin_s, 1)})


def _read(stream: IO[str], note: Callable[[dict], None]) -> str:
    """Note every line of JSON; return the last of the others."""
    last: list[str] = []
    for line in stream:
        try:
            found = json.loads(line) if line.startswith("{") else None
        except ValueError:
            found = None
        if isinstance(found, dict):
            note(found)
        elif line.strip():
            last = [*last, line.strip()][-_LAST_LINES:]
            print(line, end="", file=sys.stderr, flush=True)
    return " / ".join(last)[-300:]
