"""`moectl generate`: the answers of `moectl run`, in the order of the prompts, through a kill and a
full disk."""

import json
from pathlib import Path

import pytest

from moectl.cli import main
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint
from tests.moectl.conftest import Said
from tools.bench.serving.generate_soak import FULL_DISK, KILL, soak

pytestmark = pytest.mark.slow

PROMPTS = [
    "It was a dark",
    "and stormy night;",
    "the rain fell",
    "in torrents,",
    "except at occasional intervals",
]
OPTIONS = ("--budget", "50%", "--threads", "1", "--max-new-tokens", "8", "--ignore-eos")


@pytest.fixture
def model(checkpoint: Checkpoint) -> Path:
    return checkpoint("olmoe")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{number}", "prompt": prompt} for number, prompt in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("sampling", [("--greedy",), ("--temperature", "0.9", "--seed", "5")])
@pytest.mark.parametrize("draft", ["none", "ngram=1:3"])
def test_answers_are_those_of_a_run_each(
    model: Path, data: Path, tmp_path: Path, said: Said, sampling: tuple[str, ...], draft: str
) -> None:
    out = tmp_path / "answers.jsonl"
    told = said(
        "generate",
        str(model),
        "--data",
        str(data),
        "--out",
        str(out),
        "--batch",
        "3",
        "--counters",
        "--draft",
        draft,
        *OPTIONS,
        *sampling,
    )
    assert (told["rows"], told["earlier"], told["errors"], told["batch"], told["tokens"]) == (
        5,
        0,
        0,
        3,
        40,
    )
    found = answers(out)
    assert [(answer["row"], answer["id"]) for answer in found] == [
        (n + 1, f"p{n}") for n in range(5)
    ]
    took = [answer["moectl"] for answer in found]
    shares = sum(one["passes"] * one["share_of_passes"] for one in took)
    assert shares == pytest.approx(told["passes"])
    for name in ("hits", "drafted", "accepted", "ties"):
        of_each = sum(one["counters"][name] for one in took)
        assert of_each == pytest.approx(told["counters"][name])
    assert (told["counters"]["drafted"] > 0) == (draft != "none")
    temperature, seed = (0.0, 0) if sampling == ("--greedy",) else (0.9, 5)
    with Session.open(str(model), Settings(budget="50%", threads=1)) as session:
        for number, (prompt, answer) in enumerate(zip(PROMPTS, found, strict=True)):
            drawn = Sampling(8, temperature, top_p=0.95, seed=seed + number, ignore_eos=True)
            alone = session.stream(prompt, drawn).answer()
            assert (answer["token_ids"], answer["text"]) == (alone.token_ids, alone.text)
            assert answer["finish_reason"] == "length"


def test_the_same_command_again_does_nothing_and_another_one_is_refused(
    model: Path, data: Path, tmp_path: Path, said: Said, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    command = ("generate", str(model), "--data", str(data), "--out", str(out), *OPTIONS)
    said(*command, "--greedy")
    whole = out.read_bytes()
    told = said(*command, "--greedy", "--budget", "25%", "--batch", "2")
    assert (told["rows"], told["earlier"], told["passes"]) == (5, 5, 0)
    assert main([*command, "--temperature", "1", "--json"]) == 5
    assert "not begun by this command" in capfd.readouterr().err
    assert out.read_bytes() == whole


def test_bad_rows_are_answered_in_their_place(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "prompts.jsonl"
    out = tmp_path / "answers.jsonl"
    data.write_text(
        '{"id": 1, "prompt": "a"}\n\n{"id": 1, "prompt": "b"}\n{"prompt"\n'
        f'{json.dumps({"prompt": "long " * 200})}\n{{"messages": [{{"role": "user", "content": '
        '"c"}]}\n'
    )
    assert (
        main(["generate", str(model), "--data", str(data), "--out", str(out), *OPTIONS, "--json"])
        == 6
    )
    printed = capfd.readouterr()
    assert json.loads(printed.out)["errors"] == 4
    assert printed.err == f"moectl: 4 of 6 rows have an error in {out} instead of an answer\n"
    codes = [answer.get("error", {}).get("code") for answer in answers(out)]
    assert codes == [None, "empty_row", "duplicate_id", "broken_row", "too_long", None]


def test_prompts_are_not_overwritten(
    model: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = data.read_bytes()
    assert main(["generate", str(model), "--data", str(data), "--out", str(data), *OPTIONS]) == 2
    assert "is the file of prompts" in capfd.readouterr().err
    assert data.read_bytes() == whole


@pytest.mark.parametrize(
    ("kv", "says"), [("slow", "is for a model on a GPU"), ("slwo", "did you mean slow?")]
)
def test_a_place_of_keys_and_values_that_makes_no_sense_is_refused(
    kv: str, says: str, model: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "generate",
                str(model),
                "--data",
                str(data),
                "--out",
                str(tmp_path / "out.jsonl"),
                "--kv",
                kv,
            ]
        )
        == 2
    )
    assert says in capfd.readouterr().err and not (tmp_path / "out.jsonl").exists()


def test_a_kill_and_a_full_disk_lose_and_double_nothing(model: Path, tmp_path: Path) -> None:
    result = soak(
        tmp_path,
        model=str(model),
        num_prompts=40,
        stops=[KILL, FULL_DISK, KILL],
        tokens=6,
        batch=4,
        seed=1,
    )
    assert result.num_kills == 2 and result.num_full == 1
    assert result.num_equal == result.num_placed == result.num_rows == 40  # in float32


def test_drafted_answers_go_on_after_a_kill_as_undrafted_ones(model: Path, tmp_path: Path) -> None:
    result = soak(
        tmp_path,
        model=str(model),
        num_prompts=10,
        stops=[KILL],
        tokens=12,
        batch=4,
        seed=2,
        draft="ngram=1:3",
    )
    assert result.num_kills == 1
    assert result.num_equal == result.num_placed == result.num_rows == 10
