"""A file system whose locks are missing or do not exclude a second holder; a store on another file
system, or moved."""

import errno
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import pytest

from artifacts.common.files import replacing
from artifacts.common.locks import locked
from artifacts.errors import OutOfResources
from artifacts.store.check import check_store
from artifacts.store.database import translated
from artifacts.store.file import wal_of
from artifacts.store.store import Store
from tests.helpers.stores import MODEL, activations, run_info, said_by, verified, write

WRITE = "print(write(Path(sys.argv[1])))"


def test_a_second_writer_that_was_let_in_is_noticed_before_anything_is_lost(filled: Path) -> None:
    other = shutil.copyfile(filled, filled.with_name("other.duckdb"))
    assert write(other) == 2
    with Store.open(filled) as store:
        shutil.copyfile(other, filled)
        with pytest.raises(OutOfResources, match="another process wrote, replaced or removed"):
            store.write_run(run_info(), {"activations": activations(10)})
    assert verified(filled) == [1, 2]
    with Store.open(filled, read_only=True) as store:
        assert [finding for finding in check_store(store).findings if finding.is_loss] == []


def test_nor_does_closing_lose_what_the_second_wrote(path: Path) -> None:
    """The first, which has made the store, has a model in its write-ahead log."""
    with Store.open(path) as store:
        store.add_model(MODEL)
        for file in (
            path,
            wal_of(path),
        ):  # closing any handle of a file drops this process's lock on it
            file.open("rb").close()
        assert said_by(WRITE, path) == "1\n"
    assert verified(path) == [1]


def test_nor_does_one_that_wrote_nothing_remove_it(path: Path, tmp_path: Path) -> None:
    write(tmp_path / "other.duckdb")
    with Store.open(path):
        shutil.copyfile(tmp_path / "other.duckdb", path)
    assert verified(path) == [1]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_run_is_not_written_into_a_file_that_was_replaced_or_removed(
    filled: Path, is_replaced: bool
) -> None:
    aside = filled.with_name("aside.duckdb")
    with Store.open(filled) as store:
        shutil.copyfile(filled, aside)
        filled.unlink()
        if is_replaced:
            shutil.copyfile(aside, filled)
        with pytest.raises(OutOfResources, match="replaced or removed"):
            store.write_run(run_info(), {"activations": activations(10)})
    assert verified(aside) == [1]


def test_one_process_writes_run_after_run(path: Path) -> None:
    with Store.open(path) as store:
        store.add_model(MODEL)
        assert [
            store.write_run(run_info(), {"activations": activations(10)}) for _ in range(3)
        ] == [1, 2, 3]
    assert verified(path) == [1, 2, 3]


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (
            "Conflicting lock is held in /usr/bin/python3 (PID 41).",
            "is in use by process 41; wait until it ends",
        ),
        (
            "Conflicting lock is held in PID 0.",
            "by a process that is not seen here, or its file system has no locks",
        ),
        (
            "File locks are not supported for this file system",
            "or its file system has no locks; wait, or name a store",
        ),
    ],
)
def test_a_lock_that_is_not_granted_is_told_as_what_it_is(path: Path, says: str, told: str) -> None:
    with pytest.raises(OutOfResources, match=told), translated(path):
        raise duckdb.IOException(f'IO Error: Could not set lock on file "{path}": {says}')


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    with (
        locked(lock, busy=""),
        pytest.raises(OutOfResources, match="^wait$"),
        locked(lock, busy="wait"),
    ):
        pytest.fail("two could have come here")
    with locked(lock, busy="wait"):
        pass


def unsupported(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize(
    ("flock", "told"), [(unsupported, "has no locks"), (lambda *_: None, "grants one lock twice")]
)
def test_a_folder_whose_locks_keep_nobody_out_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flock: object, told: str
) -> None:
    monkeypatch.setattr(fcntl, "flock", flock)
    refused = pytest.raises(OutOfResources, match=f"{told}.*: name a folder on a local disk")
    with refused, locked(tmp_path / ".lock", busy="wait"):
        pytest.fail("two could have come here")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system, where there is one."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    with TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def test_a_store_behind_a_link_is_on_its_own_file_system(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere / "moe.duckdb")
    assert [write(path), write(path)] == [1, 2]
    assert path.is_symlink() and verified(elsewhere / "moe.duckdb") == [1, 2]


def test_a_file_behind_a_link_is_replaced_where_it_lies(tmp_path: Path, elsewhere: Path) -> None:
    link = tmp_path / "report.html"
    file = elsewhere / "served.html"
    file.write_text("old")
    link.symlink_to(file)
    with replacing(link) as temporary:
        temporary.write_text("new")
    assert link.is_symlink() and file.read_text() == "new" and list(elsewhere.iterdir()) == [file]
