"""Prompts on several workers: the answers of one process, a worker that is killed, a part that
always fails."""

import json
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from moectl.cli import main
from moectl.generating.prompts import PromptRow
from moectl.generating.spread import AnswerRows, RowsAnswered
from tests.conftest import Checkpoint
from tests.moectl.conftest import Said

pytestmark = pytest.mark.slow

OPTIONS = ("--budget", "50%", "--max-new-tokens", "4", "--ignore-eos", "--greedy")
MARK = "MOECTL_TEST_BEGUN"


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """That real workers are spawned: tests/profilers/workers. A fork spares each a second of
    imports."""
    monkeypatch.setattr(
        "profilers.workers.workers.get_context", lambda _: multiprocessing.get_context("fork")
    )


@pytest.fixture
def asked(checkpoint: Checkpoint, tmp_path: Path) -> list[str]:
    """The command without its file of answers: sixteen prompts, one of them empty, in parts of two
    rows."""
    data = tmp_path / "prompts.jsonl"
    rows = [
        json.dumps({"id": n, "prompt": f"{n} sheep and a {'very ' * (n % 5)}old dog"})
        for n in range(16)
    ]
    data.write_text("\n".join([*rows[:5], "", *rows[6:]]) + "\n")
    return ["generate", str(checkpoint("olmoe")), "--data", str(data), *OPTIONS, "--out"]


class KilledOnce(AnswerRows):
    """The worker of row 3 is killed at the first attempt."""

    def __call__(self, rows: Sequence[PromptRow]) -> RowsAnswered:
        begun = Path(os.environ[MARK])
        if rows[0].number == 3 and not begun.exists():
            begun.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(rows)


class Fails(AnswerRows):
    """The part of row 9 always fails."""

    def __call__(self, rows: Sequence[PromptRow]) -> RowsAnswered:
        if rows[0].number == 9:
            raise ValueError("not finite")
        return super().__call__(rows)


def test_the_answers_are_those_of_one_process_though_a_worker_is_killed(
    asked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    here = tmp_path / "here.jsonl"
    spread = tmp_path / "spread.jsonl"
    monkeypatch.setenv(MARK, str(tmp_path / "begun"))
    monkeypatch.setattr("moectl.generating.spread.AnswerRows", KilledOnce)
    assert main([*asked, str(here), "--threads", "1", "--json"]) == 6
    alone = json.loads(capfd.readouterr().out)
    assert main([*asked, str(spread), "--jobs", "2", "--json"]) == 6
    told = json.loads(capfd.readouterr().out)
    assert (tmp_path / "begun").exists() and spread.read_bytes() == here.read_bytes()
    same = ("rows", "errors", "tokens", "prompt_tokens")
    assert [told[name] for name in same] == [alone[name] for name in same]
    # an expert that two parts want counts twice
    assert told["counters"]["requests"] >= alone["counters"]["requests"] > 0


def test_a_part_that_always_fails_is_named_and_the_same_command_goes_on_there(
    asked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "answers.jsonl"
    with monkeypatch.context() as broken:
        broken.setattr("moectl.generating.spread.AnswerRows", Fails)
        assert main([*asked, str(out), "--jobs", "2", "--json"]) == 6
    assert (
        "rows 9 to 10 were tried 3 times and could not be answered: ValueError: not finite"
        in capfd.readouterr().err
    )
    assert len(out.read_text().splitlines()) == 8
    assert main([*asked, str(out), "--jobs", "2", "--json"]) == 6
    assert json.loads(capfd.readouterr().out)["earlier"] == 8
    assert [json.loads(line)["row"] for line in out.read_text().splitlines()] == list(range(1, 17))


def test_nothing_is_left_to_do(asked: list[str], tmp_path: Path, said: Said) -> None:
    data = Path(asked[3])
    data.write_text('{"prompt": "one"}\n')
    command = [*asked, str(tmp_path / "answers.jsonl"), "--jobs", "2"]
    assert said(*command)["tokens"] == 4
    told = said(*command)
    assert (told["rows"], told["earlier"], told["tokens"], told["receipt"]) == (1, 1, 0, None)
