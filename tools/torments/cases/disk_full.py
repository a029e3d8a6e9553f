"""A disk that is full at any byte of a command that writes."""

import ctypes
import os
import random
import shutil
from pathlib import Path

from moectl.shared.terminal.exit_codes import DONE, RESOURCES
from tools.torments.cases import Lost
from tools.torments.victim_commands import drawn
from tools.torments.victims import Ended, Victims

_DISK = 48 << 20  # bytes
# of unshare(2), mount(2): for this process and its children alone
_NEWNS = 0x20000
_PRIVATE = 0x44000


class DiskFull:
    """Exit code 4 and one line; earlier data is intact, nothing half written stays, and with space
    the same command succeeds. The disk is a small tmpfs; where mounting is not allowed, the length
    of files is limited instead."""

    classes = (2, 3)
    share = 3.0

    def __init__(self, ground: Path) -> None:
        self._disk = ground / "disk"
        self._disk.mkdir()
        self._is_mounted = _mounted(self._disk)
        self._victims = Victims(ground)
        self._needed: dict[tuple[str, bool], int] = {}

    def one(self, rng: random.Random) -> str:
        command, has_runs = drawn(rng)
        folder = self._victims.fresh("full", has_runs=has_runs, under=self._disk)
        room = int(self._most(command, has_runs=has_runs) * rng.random())
        ended = self._starved(command, folder, room)
        times = self._victims.check(command, folder, has_runs=has_runs)
        _check_end(command, ended, folder)
        self._victims.finish(command, folder, has_runs=has_runs, times=times)
        if ended.code == DONE:
            return f"2: room for {command}"
        return (
            f"3: full when the run of {command} was in the log"
            if times
            else f"2: full in {command}"
        )

    def _starved(self, command: str, folder: Path, room: int) -> Ended:
        self._victims.known(command, has_runs=(folder / "moe.duckdb").exists())
        if not self._is_mounted:
            return self._victims.start(command, folder, longest_file=room).end()
        ballast = self._disk / "ballast"
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(self._disk).free - room))
        try:
            return self._victims.start(command, folder).end()
        finally:
            ballast.unlink()

    def _most(self, command: str, *, has_runs: bool) -> int:
        """Slightly more bytes than the command needs."""
        key = (command, has_runs)
        if key not in self._needed:
            folder = self._victims.fresh("whole", has_runs=has_runs)
            before = _nbytes(folder)
            self._victims.finish(command, folder, has_runs=has_runs, times=0)
            self._needed[key] = int(1.5 * (_nbytes(folder) - before)) + 500_000
        return self._needed[key]


def _check_end(command: str, ended: Ended, folder: Path) -> None:
    lines = [line for line in ended.said.splitlines() if line.startswith("moectl: ")]
    if ended.code not in (DONE, RESOURCES) or len(lines) != (ended.code == RESOURCES):
        raise Lost(f"{command}: exit {ended.code}: {ended.said[-400:]}")
    if half := [path for path in folder.rglob("*.tmp") if path.name.startswith(".")]:
        raise Lost(f"{command}: exit {ended.code} and {half[0].name} stays")


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _mounted(folder: Path) -> bool:
    """Mount a tmpfs that ends with this process; False where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare") or libc.unshare(_NEWNS):
        return False
    if libc.mount(None, b"/", None, _PRIVATE, None):
        return False
    return not libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={_DISK}".encode())
