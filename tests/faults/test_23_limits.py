"""Too few open files, threads or memory, no temporary folder, other rights, a port in use, a clock
that goes back."""

import errno
import os
import re
import resource
import socket
from datetime import datetime
from pathlib import Path
from unittest.mock import MagicMock

import duckdb
import pytest

from artifacts.common.files import replacing
from artifacts.errors import BadInput, OutOfResources, shortage
from artifacts.quantisation.replica_file import file_hash
from artifacts.store.check import check_store
from artifacts.store.database import translated
from artifacts.store.store import Store
from moectl.cli import main
from moectl.commands.start import run
from moectl.shared import opening
from runtime.session import learn_maps
from tests import ROOT
from tests.helpers.stores import said_by, verified, write
from tools.docs.house import PACKAGES


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "may not open more files"),
        (
            RuntimeError("unable to open file <x>: Too many open files (24)"),
            "may not open more files",
        ),
        (
            RuntimeError("unable to mmap 176904 bytes: Cannot allocate memory (12)"),
            "not enough memory",
        ),
        (RuntimeError("can't start new thread"), "no more threads may be started"),
        (
            BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
            "no more processes may be started",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            "set TMPDIR",
        ),
    ],
)
def test_what_the_process_lacks_is_named_with_its_remedy(error: Exception, says: str) -> None:
    assert says in str(shortage(error))
    assert shortage(ValueError("any other")) is None


def test_a_store_is_not_called_damaged_where_memory_or_files_are_short(path: Path) -> None:
    """DuckDB reports both as errors of the file; its advice to make the store anew would lose
    it."""
    for says in ("FATAL Error: Failed to create checkpoint: bad allocation", "Too many open files"):
        with pytest.raises(OutOfResources, match="cannot work on"), translated(path):
            raise duckdb.Error(says)


FEW_FILES = """
import resource
from artifacts.errors import OutOfResources
write(Path(sys.argv[1]))
limit = len(os.listdir("/proc/self/fd"))
for more in (0, 2, 4, 20):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        print("written" if write(Path(sys.argv[1]), 100) else "")
    except OSError as error:  # exit_codes has the line for it
        print(error.errno)
    except OutOfResources as error:
        print("refused")
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="nothing counts the open files here")
def test_a_store_stays_whole_where_few_files_may_be_open(path: Path) -> None:
    said = said_by(FEW_FILES, path).split()
    assert set(said) <= {"written", "refused", str(errno.EMFILE)} and {"written"} < set(said)
    assert len(verified(path)) == 1 + said.count("written")
    with Store.open(path, read_only=True) as store:
        assert check_store(store).findings == ()


def test_a_replica_is_not_called_damaged_where_files_are_short(tmp_path: Path) -> None:
    (tmp_path / "replica").touch()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        with pytest.raises(OutOfResources, match="may not open more files"):
            file_hash(tmp_path / "replica")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("mask", [0o000, 0o027, 0o077])
def test_what_is_written_has_the_rights_that_the_umask_leaves(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write(tmp_path / "moe.duckdb")
        with replacing(tmp_path / "page.html") as temporary:
            temporary.touch()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~mask}


def test_what_is_no_plain_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    """As `--out /dev/null` by root."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="it is no plain file"), replacing(tmp_path / "pipe"):
        pass
    assert (tmp_path / "pipe").is_fifo()


def test_a_port_in_use_is_told_before_the_model_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert main(["serve", str(tmp_path), "--port", port]) == 4
        assert capsys.readouterr().err == (
            f"moectl: port {port} of 127.0.0.1 is in use by another server: end that one, or "
            "give another --port\n"
        )
        socket.create_connection(server.getsockname()).close()  # the first one still answers


def test_a_clock_that_goes_backwards_makes_no_negative_duration(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    hours = iter(range(9, 0, -1))
    said = {}
    monkeypatch.setattr(run, "utc_now", lambda: datetime(2026, 1, 1, next(hours)))
    monkeypatch.setattr(
        learn_maps, "write_learned_maps", lambda learned, **given: said.update(given)
    )
    monkeypatch.setattr(opening, "model_info", lambda *names: None)
    with run.keeping_maps(MagicMock(), "model", store=path):
        pass
    assert said["started_at"].hour == 9 and said["seconds"] >= 0


def test_no_duration_is_a_difference_of_two_times_of_day() -> None:
    """Those jump when the clock is set."""
    difference = re.compile(r"(utc_now|time\.time|time_ns|\.now)\([^)]*\) - ")
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert (
        len(files) > 100 and [file for file in files if difference.search(file.read_text())] == []
    )
