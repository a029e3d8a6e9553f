"""A store that another process holds.

As a user meets it, at the command line: tests/moectl/commands/test_bad_input.py.
"""

import time

import pytest

from artifacts.errors import OutOfResources
from artifacts.store.store import Store, add_run
from tests.helpers.stores import activations, run_info, spawn, verified

pytestmark = pytest.mark.slow

HOLD = """
import sys, time, duckdb
connection = duckdb.connect(sys.argv[1], read_only=sys.argv[2] == "reader")
print("open", flush=True)
time.sleep(float(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("holder", "read_only"), [("writer", False), ("writer", True), ("reader", False)]
)
def test_a_store_in_use_is_refused_at_once_with_the_holder(filled, holder, read_only):
    process = spawn(HOLD, filled, holder, 30)
    try:
        assert process.stdout.readline() == "open\n"
        start = time.monotonic()
        with pytest.raises(OutOfResources, match=f"in use by process {process.pid};"):
            Store.open(filled, read_only=read_only)
        assert time.monotonic() - start < 2
    finally:
        process.kill()
        process.wait()


def test_a_reader_waits_a_moment_for_a_writer(filled):
    process = spawn(HOLD, filled, "writer", 0.3)
    assert process.stdout.readline() == "open\n"
    assert verified(filled) == [1]
    process.wait()


def test_what_ends_long_work_waits(filled):
    process = spawn(HOLD, filled, "reader", 1.5)
    assert process.stdout.readline() == "open\n"
    assert add_run(filled, run_info(), {"activations": activations(10)}) == 2
    process.wait()


def test_two_readers_do_not_mind_each_other(filled):
    process = spawn(HOLD, filled, "reader", 30)
    assert process.stdout.readline() == "open\n"
    assert verified(filled) == [1]
    process.kill()
    process.wait()


ENDING = """
import time
class Slow:
    def __init__(self, connection): self._connection = connection
    def __getattr__(self, name): return getattr(self._connection, name)
    def close(self):
        self._connection.close()
        while not Path(sys.argv[2]).exists():  # in which another takes the store up
            time.sleep(0.02)
store = Store.open(Path(sys.argv[1]))
store._connection = Slow(store._connection)
print("open", flush=True)
store.close()
"""


def test_a_command_that_wrote_nothing_takes_no_store_away_from_one_that_does(path):
    """Both commands open the missing store; the first, which wrote nothing, must not remove it when
    it closes."""
    first = spawn(ENDING, path, written := path.with_name("written"))
    assert first.stdout.readline() == "open\n"
    assert add_run(path, run_info(), {"activations": activations(10)}) == 1
    written.touch()
    assert first.wait() == 0
    assert verified(path) == [1]
