"""Workers on a real Ray cluster of two: a killed one, a task that always fails, and the same
numbers as one process.

All tests of this file share one cluster, started and ended as `--executor ray` does.
"""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from artifacts.errors import OutOfResources
from moectl.cli import main
from moectl.generating import spread
from moectl.generating.prompts import PromptRow
from moectl.generating.spread import AnswerRows, RowsAnswered
from profilers.quantise import one_expert, replicas
from profilers.quantise.one_expert import ExpertDone, ExpertTask
from profilers.workers.choose import executing
from profilers.workers.workers import Executor, Workers
from tests import ROOT
from tests.conftest import Checkpoint

pytestmark = pytest.mark.slow

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'moectl[ray]'")
TRACE = ROOT / "tests" / "data" / "demo-trace.parquet"
TEXT = ["--data", "text.txt"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Executor]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(ROOT))  # workers import this file
        with executing("ray", 2) as cluster:
            yield cluster
    assert not ray.is_initialized()


@pytest.fixture
def model(
    cluster: Executor, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A checkpoint. Commands run in the test's own folder, which has a text; the workers run in
    another."""
    monkeypatch.chdir(tmp_path)
    lines = [
        f"Line {line}: {line * line} sheep and a {'very ' * (line % 5)}old dog.\n"
        for line in range(40)
    ]
    Path("text.txt").write_text("".join(lines))
    return str(checkpoint("olmoe"))


def work(task: object) -> object:
    if task == "full":
        raise OutOfResources("no space left")
    if task == "bug":
        raise ValueError("of ours")
    return task, os.getpid()


def test_every_task_once_elsewhere_and_what_is_lost_is_told(cluster: Executor) -> None:
    heard = []
    with Workers(work, cluster, heard.append) as workers:
        for task in (0, 1, 2, "bug", 3, 4):
            workers.submit(task, task)
        lost = workers.finish()
    processes = {process for _, process in heard}
    assert (
        sorted(task for task, _ in heard) == list(range(5))
        and os.getpid() not in processes
        and len(processes) <= 2
    )
    assert lost.keys() == {"bug"} and isinstance(lost["bug"], RuntimeError)
    assert str(lost["bug"]).endswith("ValueError: of ours\n")


def test_what_another_attempt_would_not_mend_is_raised_at_once(cluster: Executor) -> None:
    with (
        pytest.raises(OutOfResources, match="^no space left$"),
        Workers(work, cluster, print) as workers,
    ):
        workers.submit("full")
        workers.finish()


def poisoned(unit: ExpertTask) -> ExpertDone:
    """One expert always fails; one of another layer kills its worker at the first attempt."""
    if (unit.layer, unit.expert) == (0, 1):
        raise ValueError("not finite")
    if (unit.layer, unit.expert) == (1, 3) and not (
        begun := unit.path.with_suffix(".begun")
    ).exists():
        begun.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return one_expert.work(unit)


def test_replicas_are_the_bytes_of_one_process(
    model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    quantize = [
        "quantize",
        model,
        *TEXT,
        "--samples",
        "4",
        "--length",
        "32",
        "--recipe",
        "refined",
        "--bits",
        "2",
    ]
    with monkeypatch.context() as broken:
        broken.setattr(replicas, "work", poisoned)
        assert main([*quantize, "--executor", "ray:auto"]) == 6
    said = capfd.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "1 of 16 experts were tried 3 times and could not be done: layer 0 expert 1;" in said.err
    assert len(files()) == 15 and not Path("moe.duckdb").exists()
    assert main([*quantize, "--executor", "ray:auto"]) == 0
    assert "15 done before" in capfd.readouterr().out
    assert main([*quantize, "--jobs", "1", "--store", "here.duckdb"]) == 0
    assert files() == files("here.duckdb")


def files(store: str = "moe.duckdb") -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in Path(f"{store}.replicas").rglob("L*.safetensors")
    }


class KilledOnce(AnswerRows):
    """The first part kills its worker at the first attempt."""

    def __call__(self, rows: Sequence[PromptRow]) -> RowsAnswered:
        begun = Path(self._model.name).with_name("begun")
        if rows[0].number == 1 and not begun.exists():
            begun.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(rows)


def test_prompts_are_answered_once_though_a_worker_is_killed(
    model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begun = Path(model).with_name("begun")
    begun.unlink(missing_ok=True)
    asked = [
        "generate",
        model,
        "--data",
        "text.txt",
        "--greedy",
        "--max-new-tokens",
        "4",
        "--json",
        "--out",
    ]
    monkeypatch.setattr(spread, "AnswerRows", KilledOnce)
    assert main([*asked, "spread.jsonl", "--executor", "ray:auto"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["rows"], told["errors"]) == (40, 0) and begun.exists()
    assert main([*asked, "here.jsonl", "--threads", "1"]) == 0
    assert Path("spread.jsonl").read_bytes() == Path("here.jsonl").read_bytes()
