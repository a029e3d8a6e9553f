"""The file of answers: in order, whole lines only, and never another command's."""

import json
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.errors import BadInput, Incompatible, OutOfResources
from moectl.generating.answer_file import appended


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def fill(path: Path, *numbers: int, run: str = "r") -> tuple[int, int]:
    """Put answers by number, those divisible by 3 as errors; return how many are written and how
    many are errors."""
    with appended(path, run) as answers:
        for number in numbers:
            answers.put(number, {"error": {}} if number % 3 == 0 else {"text": "é" * number})
        return answers.num_written, answers.num_bad


def rows(path: Path) -> list[int]:
    return [json.loads(line)["row"] for line in path.read_text(encoding="utf-8").splitlines()]


@given(st.permutations(range(1, 9)), st.integers(0, 8))
def test_answers_stand_in_order_and_none_stands_twice(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], stop: int
) -> None:
    """Whatever order they come in, and wherever a command is stopped."""
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    written, _ = fill(path, *order[:stop])
    assert rows(path) == list(range(1, written + 1))
    assert fill(path, *(number for number in order if number > written)) == (8, 2)
    assert rows(path) == list(range(1, 9))


def test_a_line_that_was_not_finished_is_dropped(path: Path) -> None:
    fill(path, 1, 2)
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        written, _ = fill(path)
        assert path.read_bytes() == whole[: len(path.read_bytes())]
        assert rows(path) == list(range(1, written + 1))


@pytest.mark.parametrize(
    "content", [b"mine\n", b"mine", b"{}\n", b"[]\n", b'{"row": 2, "run": "r"}\n', b"[" * 99999]
)
def test_another_file_is_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(Incompatible, match="name another with --out"):
        fill(path, 1)
    assert path.read_bytes() == content


def test_answers_of_another_run_are_refused(path: Path) -> None:
    fill(path, 1, 2)
    with pytest.raises(Incompatible, match="not begun by this command"):
        fill(path, run="other")
    assert rows(path) == [1, 2]


def test_two_commands_do_not_write_one_file(path: Path) -> None:
    with appended(path, "r"), pytest.raises(OutOfResources, match="another command writes"):
        fill(path, 1)


def test_a_full_disk_leaves_whole_lines(path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, limits[1]))
    try:
        with pytest.raises(OutOfResources, match="no space left"):
            fill(path, 1, 2, 3, 4, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert rows(path) == [1, 2, 3]
    assert fill(path, 4, 5) == (5, 1)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no folder"):
        fill(tmp_path / "none" / "answers.jsonl", 1)
