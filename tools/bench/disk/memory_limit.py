"""Commands run within a limit on memory, the page cache of their files included: memory control
groups of Linux."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from artifacts.errors import BadInput
from tools.bench.disk.way import Way, child
from tools.bench.measuring import drop, in_turns, last_line, process_environment

log = logging.getLogger("bench_disk")

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


@dataclass(frozen=True, slots=True)
class LimitedReadings:
    """What a way reported in each round, as its measure says, and the peak memory of all of them,
    page cache included."""

    rounds: list[dict[str, float]]
    peak_nbytes: int

    def median(self, name: str) -> float:
        return median(one[name] for one in self.rounds)

    def of(self, name: str) -> list[float]:
        return [one[name] for one in self.rounds]


def limited_rounds(
    kind: str,
    ways: Mapping[Way, tuple[Path, int, int]],
    *,
    rounds: int,
    memory_gib: float,
    folders: Sequence[Path],
) -> dict[Way, LimitedReadings]:
    """Measure each way in turns on one thread, with the path and numbers that belong to it, each
    in a process with so much memory that begins with nothing of `folders` in the page cache."""
    found = {way: LimitedReadings([], 0) for way in ways}
    for turn, way in in_turns(list(ways), rounds):
        drop(*folders)
        done = run_limited(
            [sys.executable, *child(kind, way, *ways[way])],
            int(memory_gib * 2**30),
            environment=process_environment(OMP_NUM_THREADS="1"),
        )
        before = found[way]
        told = json.loads(last_line(done.output))
        found[way] = LimitedReadings(
            [*before.rounds, told], max(before.peak_nbytes, done.peak_nbytes)
        )
        log.info("round %d: %s: %s", turn + 1, way.label, told)
    return found


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
