"""Commands run within a limit on memory, the page cache of their files included: memory control
groups of Linux."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from artifacts.errors import BadInput
from tools import ROOT

_MOUNT = Path("/sys/fs/cgroup")


class Limited(NamedTuple):
    """Output of a command, and its peak memory, page cache included."""

    output: str
    peak_nbytes: int


class _Files(NamedTuple):
    """A group's files for its limit and its peak."""

    limit: str
    peak: str


_FIRST = _Files("memory.limit_in_bytes", "memory.max_usage_in_bytes")
# of the second version of control groups, on which this was never run
_SECOND = _Files("memory.max", "memory.peak")


def process_environment() -> dict[str, str]:
    """Return the environment of a command that imports this repository and computes on one
    thread."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run_limited(command: Sequence[str], nbytes: int, *, environment: dict[str, str]) -> Limited:
    """Run a command in a group of its own. Pages of files count for the group that read them first:
    drop them before.

    Raises BadInput where groups cannot be made, and if the command fails.
    """
    with _group(nbytes) as (folder, files):
        entering = ["sh", "-c", f'echo $$ > "{folder}/cgroup.procs" && exec "$@"', "sh", *command]
        done = subprocess.run(
            entering, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise BadInput(
                f"{' '.join(command)} failed within {nbytes / 2**30:.1f} GiB (exit "
                f"{done.returncode})"
            )
        return Limited(done.stdout, int((folder / files.peak).read_text()))


@contextmanager
def _group(nbytes: int) -> Iterator[tuple[Path, _Files]]:
    parent, files = _parent()
    folder = parent / f"moectl-bench-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / files.limit).write_text(str(nbytes))
    except OSError as error:
        raise BadInput(
            f"{folder} cannot limit memory ({error.strerror}): run as root on Linux"
        ) from error
    try:
        yield folder, files
    finally:
        folder.rmdir()


def _parent() -> tuple[Path, _Files]:
    """The group that this process is in, or the outermost one of the second version."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _MOUNT / "memory" / path.removeprefix("/"), _FIRST
    return _MOUNT, _SECOND
