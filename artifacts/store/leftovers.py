"""Leftovers of stopped commands beside a store, and how to resume from them or remove them."""

import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from artifacts.store.file import wal_of

_TEMPORARY = re.compile(r"\.(.+)\.(\d+)\.tmp(\.wal)?")
_GO_ON = "the same command goes on from there; or remove it"


@dataclass(frozen=True, slots=True)
class StoreFinding:
    """One defect: the object, what is wrong, and the remedy. `is_loss` is False for mere
    leftovers."""

    about: str
    says: str
    remedy: str
    is_loss: bool = True


def beside(store: Path) -> Iterator[StoreFinding]:
    """Leftovers next to the store's file: names that begin with the store's."""
    if (wal := wal_of(store)).exists():
        says = f"{wal.stat().st_size} bytes that a stopped command had not yet put into the store"
        remedy = "the next command that writes takes them up; do not copy the store without it"
        yield _left(wal, says, remedy)
    for path in sorted(store.parent.iterdir()):
        if path.name.startswith(f".{store.name}") and (pid := _writer(path)):
            yield _left(path, f"half written by process {pid}, which is gone", "remove it")
        elif path.name.startswith(f"{store.name}.profile-"):
            yield _left(path, "a profile under way or stopped", _GO_ON)
        elif path.name.startswith(f"{store.name}.bench-"):
            yield _left(path, "a bench under way or stopped", _GO_ON)
        elif path.name == f"{store.name}.tmp":
            yield _left(path, "DuckDB's own, of a command that was stopped", "remove it")


def unnamed(root: Path, named: set[Path]) -> Iterator[StoreFinding]:
    """Files among a store's replicas that no run names; folders that a running quantize holds are
    skipped."""
    folders = sorted(path for path in root.iterdir() if not _is_held(path)) if root.is_dir() else []
    for folder in folders:
        files = (
            [path for path in sorted(folder.iterdir()) if path.name != ".lock"]
            if folder.is_dir()
            else [folder]
        )
        if folder not in {path.parent for path in named}:
            num_replicas = sum(path.suffix == ".safetensors" for path in files)
            yield _left(
                folder,
                f"{num_replicas} replica files that no run names: a quantize that was stopped",
                _GO_ON,
            )
            continue
        for path in files:
            if path not in named:
                yield _left(
                    path,
                    "no run names it" if path.suffix == ".safetensors" else "half written",
                    "remove it",
                )


def _left(path: Path, says: str, remedy: str) -> StoreFinding:
    return StoreFinding(path.name, says, remedy, is_loss=False)


def _writer(path: Path) -> int | None:
    """The process that wrote this temporary file, if it no longer runs."""
    match = _TEMPORARY.fullmatch(path.name)
    if match is None:
        return None
    try:
        os.kill(int(match[2]), 0)
    except ProcessLookupError:
        return int(match[2])
    except PermissionError:
        pass
    return None


def _is_held(folder: Path) -> bool:
    try:
        with (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
