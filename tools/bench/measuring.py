"""What benches share: whose turn it is, modules run in processes of their own, and what a process
reads and holds."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tools import ROOT

_Way = TypeVar("_Way")


def in_turns(ways: Sequence[_Way], rounds: int) -> Iterator[tuple[int, _Way]]:
    """Yield each of `ways` in each round, after the number of the round. Rounds begin with another
    each, so that other load of the machine affects all alike."""
    for turn in range(rounds):
        start = turn % len(ways)
        for way in (*ways[start:], *ways[:start]):
            yield turn, way


def process_environment(**own: str) -> dict[str, str]:
    """Return the environment of a command that imports this repository."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path} | own


def output_of(module: str, *arguments: object) -> str:
    """Return what a module prints in a process of its own; this one exits if that fails."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, env=process_environment(), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{module} {' '.join(command[3:])} failed")
    return done.stdout


def last_line(output: str) -> str:
    return output.strip().rpartition("\n")[2]


def drop(*folders: Path) -> None:
    """Drop the files of these folders from the page cache, unless a process has them mapped."""
    for path in files_of(folders):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def files_of(folders: Sequence[Path]) -> list[Path]:
    return [path for folder in folders for path in folder.iterdir() if path.is_file()]


def weights_nbytes(folder: Path) -> int:
    """Return the bytes of a checkpoint's files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def read_nbytes() -> int:
    """Bytes that the device has read for this process so far."""
    return int(Path("/proc/self/io").read_text().partition("\nread_bytes:")[2].split()[0])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_nbytes(process: int | str = "self") -> int:
    """Peak resident bytes of a process. (`ru_maxrss` would include the peak of its parent.)"""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def least_ratio(own: Callable[[int], object], other: Callable[[int], object], rounds: int) -> float:
    """Return the least time of the processor of `own` over the least of `other`, in rounds whose
    number both get; the first warms up."""
    times = [(_thread_s(own, turn), _thread_s(other, turn)) for turn in range(rounds + 1)][1:]
    return min(mine for mine, _ in times) / min(theirs for _, theirs in times)


def _thread_s(work: Callable[[int], object], turn: int) -> float:
    begin_s = time.thread_time()
    work(turn)
    return time.thread_time() - begin_s
