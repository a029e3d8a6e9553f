"""A write-ahead log that is lost, cut off, foreign or left behind."""

import shutil
from pathlib import Path

import duckdb
import pytest

from artifacts.errors import BadInput
from artifacts.store.check import check_store
from artifacts.store.file import wal_of
from artifacts.store.store import Store
from moectl.cli import main
from moectl.shared.terminal.exit_codes import INPUT, PARTLY
from tests.helpers.stores import said_by, verified, write

pytestmark = pytest.mark.slow

KILLED_BEFORE_CHECKPOINT = """
class Dying:
    def __init__(self, connection): self._connection = connection
    def __getattr__(self, name): return getattr(self._connection, name)
    def execute(self, query, *arguments):
        if query.startswith("CHECKPOINT"):
            os.kill(os.getpid(), 9)
        return self._connection.execute(query, *arguments)
def dying(path):
    store = Store.open(path)
    store._connection = Dying(store._connection)
    store.write_run(run_info(), {"activations": activations(3000)})
for name in sys.argv[1:]:
    print(forked(lambda: dying(Path(name))))
"""


@pytest.fixture
def logged(filled: Path) -> Path:
    """A store whose second run, not yet reported complete, is in the log only."""
    assert said_by(KILLED_BEFORE_CHECKPOINT, filled) == "-9\n"
    assert wal_of(filled).stat().st_size > 1000
    return filled


def test_the_log_is_told_and_taken_up(logged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verified(logged) == [1, 2] and wal_of(logged).exists()
    assert main(["inspect", "store", "--verify", "--store", str(logged)]) == PARTLY
    assert "do not copy the store without it" in capsys.readouterr().out
    assert write(logged) == 3 and not wal_of(logged).exists()
    assert main(["inspect", "store", "--verify", "--store", str(logged)]) == 0


def test_without_its_log_a_store_has_what_it_had(logged: Path) -> None:
    """Every run that was reported complete is in the file itself."""
    wal_of(logged).unlink()
    assert verified(logged) == [1]


@pytest.mark.parametrize("read_only", [True, False])
def test_a_log_that_is_cut_off_gives_whole_runs(logged: Path, read_only: bool) -> None:
    store = logged.read_bytes()
    log = wal_of(logged).read_bytes()
    for size in (0, 7, 40, len(log) // 2, len(log) - 1):
        logged.write_bytes(store)
        wal_of(logged).write_bytes(log[:size])
        with Store.open(logged, read_only=read_only):
            pass
        assert verified(logged) in ([1], [1, 2])


@pytest.mark.parametrize("how", ["foreign", "flipped", "older"])
def test_a_log_that_does_not_fit_is_refused_and_loses_nothing(
    logged: Path, how: str, tmp_path: Path
) -> None:
    log = wal_of(logged).read_bytes()
    if how == "foreign":
        write(other := tmp_path / "other.duckdb")
        said_by(KILLED_BEFORE_CHECKPOINT, other)
        shutil.move(wal_of(other), wal_of(logged))
    elif how == "flipped":
        wal_of(logged).write_bytes(log[:500] + bytes([log[500] ^ 1]) + log[501:])
    else:
        write(logged)
        wal_of(logged).write_bytes(log)
    before = wal_of(logged).read_bytes()
    for read_only in (True, False):
        with pytest.raises(
            BadInput, match=f"{logged}.wal beside the store is damaged or of another one .* move it"
        ):
            Store.open(logged, read_only=read_only)
    assert main(["inspect", "store", "--verify", "--store", str(logged)]) == INPUT
    assert wal_of(logged).read_bytes() == before
    wal_of(logged).rename(tmp_path / "away")
    assert verified(logged)[0] == 1


def test_lost_rows_are_noticed(filled):
    with duckdb.connect(str(filled)) as connection:
        connection.execute("DELETE FROM activations WHERE expert = 7")
    with Store.open(filled, read_only=True) as store:
        with pytest.raises(BadInput, match="20000 rows .* are left"):
            store.read("activations", 1)
        [found] = check_store(store).findings
    assert "it wrote 20000 rows of activations and 19921 are there" in found.says and found.is_loss
