"""SIGKILL at any moment of anything that writes.

Of a quantize that is taken up again, byte for byte: tests/profilers/quantise/test_replicas.py.
"""

import signal
import time
from pathlib import Path

import pytest

from artifacts.store.check import check_store
from artifacts.store.store import Store
from tests.helpers.stores import said_by, spawn, verified, write
from tools.torments.content_hash import content_hash

pytestmark = pytest.mark.slow

WRITE_FOREVER = """
while True:
    print(write(Path(sys.argv[1])), flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.023])
def test_only_whole_runs_are_left(path: Path, delay_s: float) -> None:
    writer = spawn(WRITE_FOREVER, path)
    acknowledged = [int(writer.stdout.readline()) for _ in range(2)]
    time.sleep(delay_s)
    writer.send_signal(signal.SIGKILL)
    acknowledged += map(int, writer.stdout.read().split())
    writer.wait()
    assert verified(path)[: len(acknowledged)] == acknowledged
    again = write(path)
    with Store.open(path, read_only=True) as store:
        assert len({content_hash(store, run.run_id) for run in store.runs()}) == 1
        assert not [finding for finding in check_store(store).findings if finding.is_loss]
        assert store.runs()[-1].run_id == again


KILLED_AT = """
import artifacts.store.file as inner
def die():
    os.kill(os.getpid(), 9)
for step in ("_fill", "sync", "_named"):
    work = getattr(inner, step)
    for name, instead in (("before", lambda *all: die()), ("after", lambda *all: (work(*all), die()))):
        setattr(inner, step, instead)
        print(forked(lambda: write(Path(sys.argv[1]) / f"{step}-{name}.duckdb")), flush=True)
    setattr(inner, step, work)
"""


def test_a_store_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    assert said_by(KILLED_AT, tmp_path).split() == 6 * ["-9"]
    assert {path.name for path in tmp_path.glob("*.duckdb")} == {"_named-after.duckdb"}
    for step in (
        "_fill-before",
        "_fill-after",
        "sync-before",
        "sync-after",
        "_named-before",
        "_named-after",
    ):
        path = tmp_path / f"{step}.duckdb"
        assert write(path) == 1
        with Store.open(path, read_only=True) as store:
            findings = check_store(store).findings
        assert findings
        for left in findings:  # the file, and its log if it was committed
            assert (
                left.about.startswith(f".{path.name}.")
                and "half written by process" in left.says
                and not left.is_loss
            )
