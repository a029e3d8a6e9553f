"""A store that another process holds.

As a user meets it, at the command line: tests/moectl/test_bad_input.py.
"""

import time
from pathlib import Path

import pytest

from artifacts.errors import OutOfResources
from artifacts.store import Store, add_run
from tests.stores import activations, run_info, said_by, spawn, verified

HOLD = """
import sys, time, duckdb
connection = duckdb.connect(sys.argv[1], read_only=sys.argv[2] == "reader")
print("open", flush=True)
time.sleep(float(sys.argv[3]))
"""


@pytest.mark.parametrize(("holder", "read_only"), [("writer", False), ("writer", True), ("reader", False)])
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


RACING = """
def beginner():
    for _ in range(30):
        try:
            Store.open(path).close()  # as every command does before it begins
        except OutOfResources:
            pass
def writer():
    for _ in range(4):
        with Store.open(path, patience_s=20) as store:
            run = store.write_run(run_info(), {"activations": activations(3)})
        assert run in verified_patiently()
        path.unlink()
def verified_patiently():
    with Store.open(path, read_only=True, patience_s=20) as store:
        return [run.run_id for run in store.runs()]
from artifacts.errors import OutOfResources
path = Path(sys.argv[1])
if (pid := os.fork()) == 0:
    beginner()
    os._exit(0)
print(forked(writer))
os.waitpid(pid, 0)
"""


def test_a_command_that_begins_takes_no_store_away_from_one_that_ends(path: Path) -> None:
    """Both make the store where there is none; the first removes what it made for nothing."""
    assert said_by(RACING, path).split() == ["0"]
