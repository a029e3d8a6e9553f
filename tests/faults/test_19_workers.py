"""A worker process that is killed, a task that fails now and then, and one that always does: the
others are done.

Processes are forked here, which spares each a second of imports; that real ones are spawned:
tests/profilers. On a Ray cluster: tests/profilers/workers/test_ray.py; batches of a profile:
test_profiling.py there; replays: tests/moectl.
"""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from artifacts.errors import OutOfResources
from moectl.cli import main
from profilers.quantise import one_expert, replicas
from profilers.quantise.one_expert import ExpertDone, ExpertTask
from profilers.workers.workers import Processes, Workers
from tests.conftest import Checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "profilers.workers.workers.get_context", lambda _: multiprocessing.get_context("fork")
    )


def work(task: object) -> object:
    if task == "full":
        raise OutOfResources("no space left")
    if task == "bug":
        raise ValueError("of ours")
    if task == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def test_what_is_lost_is_told_and_the_others_are_done() -> None:
    heard = []
    with Workers(work, Processes(2), heard.append) as workers:
        for task in (0, "killed", 1, "bug", "killed", 2, 3, "killed", 4):
            workers.submit(task, task)
        lost = workers.finish()
        workers.submit(5)
        assert workers.finish() == {}
    assert sorted(heard) == [0, 1, 2, 3, 4, 5] and lost.keys() == {"killed", "bug"}
    assert isinstance(lost["killed"], OutOfResources) and "a worker process ended (code -9)" in str(
        lost["killed"]
    )
    assert isinstance(lost["bug"], RuntimeError) and str(lost["bug"]).endswith(
        "ValueError: of ours\n"
    )


def test_what_another_attempt_would_not_mend_is_raised_at_once() -> None:
    with (
        pytest.raises(OutOfResources, match="^no space left$"),
        Workers(work, Processes(2), lambda result: None) as workers,
    ):
        workers.submit("full")
        workers.finish()


def test_a_worker_that_is_killed_as_it_waits_is_replaced_with_its_task_lost() -> None:
    heard = []
    with Workers(work, Processes(2), heard.append) as workers:
        workers.submit(1)
        workers.finish()
        os.kill(workers._free[0].process.pid, signal.SIGKILL)
        workers._free[0].process.join()
        workers.submit(2, "second")
        assert workers.finish().keys() == {"second"}
        workers.submit(3)
        workers.finish()
    assert heard == [1, 3]


def test_leaving_ends_the_processes() -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        Workers(work, Processes(2), lambda result: None) as workers,
    ):
        workers.submit(1)
        worker = workers._busy[0].process
        raise KeyboardInterrupt
    assert not worker.is_alive()


def poisoned(unit: ExpertTask) -> ExpertDone:
    """Two experts always fail, in different ways, and one of another layer fails at first."""
    if (unit.layer, unit.expert) == (0, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if (unit.layer, unit.expert) == (0, 2):
        raise ValueError("not finite")
    if (unit.layer, unit.expert) == (1, 3) and not (
        begun := unit.path.with_suffix(".begun")
    ).exists():
        begun.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return one_expert.work(unit)


def dead(_: ExpertTask) -> ExpertDone:
    os.kill(os.getpid(), signal.SIGKILL)


def test_experts_that_cannot_be_done_leave_the_others_be(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("An old dog and a sheep by the gate.\n" * 20)
    quantize = [
        "quantize",
        str(checkpoint("olmoe")),
        "--data",
        "text.txt",
        "--samples",
        "4",
        "--length",
        "32",
    ]
    quantize += ["--recipe", "refined", "--bits", "2"]

    with monkeypatch.context() as broken:
        broken.setattr(replicas, "work", dead)
        assert main([*quantize, "--jobs", "2"]) == 4
    assert (
        "a worker process ended (code -9), most likely for lack of memory: give fewer --jobs"
        in capfd.readouterr().err
    )
    with monkeypatch.context() as broken:
        broken.setattr(replicas, "work", poisoned)
        assert main([*quantize, "--jobs", "2"]) == 6
    said = capfd.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "2 of 16 experts were tried 3 times and could not be done: layer 0 expert " in said.err
    assert "layer 0 expert 1" in said.err and "layer 0 expert 2" in said.err
    assert len(files()) == 14 and not Path("moe.duckdb").exists()

    assert main([*quantize, "--jobs", "1"]) == 0
    assert "14 done before" in capfd.readouterr().out
    assert main([*quantize, "--jobs", "1", "--store", "whole.duckdb"]) == 0
    assert files() == files("whole.duckdb")


def files(store: str = "moe.duckdb") -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in Path(f"{store}.replicas").rglob("L*.safetensors")
    }
