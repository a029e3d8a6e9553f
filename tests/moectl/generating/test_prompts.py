"""Rows of prompt files: every form, and every way to be wrong, each in its place."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from artifacts.errors import BadInput
from moectl.generating import prompts
from moectl.generating.prompts import PromptFile, PromptRow

CHAT = [
    {"role": "developer", "content": "be brief"},
    {
        "role": "user",
        "name": "bob",
        "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}],
    },
]
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello", "name": "bob"},
]


def rows(path: Path) -> list[PromptRow]:
    found = PromptFile.look(str(path))
    read = list(found.rows())
    assert len(read) == found.num_rows
    return read


def written(path: Path, *lines: bytes | object) -> Path:
    path.write_bytes(
        b"\n".join(one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines)
    )
    return path


def problem(row: object, path: Path) -> str | None:
    """The code of the problem of one row of jsonl."""
    [found] = rows(written(path / "one.jsonl", row))
    assert (found.prompt is None) != (found.problem is None)
    return found.problem and found.problem[0]


def test_lines_of_text_are_prompts(tmp_path: Path) -> None:
    path = written(
        tmp_path / "p.txt", b"\xef\xbb\xbfone", b"", b"two \xc3\xa9\r", b"\xff", b"three\n"
    )
    found = rows(path)
    assert [row.prompt for row in found] == ["one", None, "two é", None, "three"]
    assert [row.problem and row.problem[0] for row in found] == [
        None,
        "empty_row",
        None,
        "broken_row",
        None,
    ]
    packed = tmp_path / "p.txt.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert rows(packed) == found


def test_rows_of_jsonl_are_texts_and_chats(tmp_path: Path) -> None:
    given = (
        {"id": "a", "prompt": "x"},
        {"id": 7, "messages": CHAT},
        {"prompt": "y", "id": None, "other": 1},
    )
    found = rows(written(tmp_path / "p.jsonl", *given))
    assert found == [PromptRow(1, "a", "x"), PromptRow(2, 7, TURNS), PromptRow(3, None, "y")]


def test_parquet_has_the_same_columns(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    columns = {
        "id": [1, 2, 1],
        "prompt": ["x", None, "z"],
        "messages": [None, CHAT[:1], None],
        "more": [b"", b"", b""],
    }
    pq.write_table(pa.table(columns), path)
    assert [(row.id, row.prompt) for row in rows(path)] == [(1, "x"), (2, TURNS[:1]), (1, None)]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(BadInput, match="not a whole parquet file"):
        PromptFile.look(str(path))


@pytest.mark.parametrize(
    "text", ['["x", {"id": 2, "prompt": "y"}]', '{"prompt": "x"}\n{"id": 2, "prompt": "y"}']
)
def test_a_json_file_is_an_array_or_a_row_a_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    assert rows(path) == [PromptRow(1, None, "x"), PromptRow(2, 2, "y")]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["p.txt", "p.jsonl", "p.json"])
def test_another_encoding_is_refused(name: str, encoding: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes('["Return", "The"]'.encode(encoding))
    with pytest.raises(BadInput, match="is not UTF-8 text but UTF-16"):
        PromptFile.look(str(tmp_path / name))


@pytest.mark.parametrize("kind", [pa.float64(), pa.decimal128(20, 0), pa.uint64(), pa.int8()])
def test_ids_are_numbers_of_any_type(kind: pa.DataType, tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"id": pa.array([1, 2]).cast(kind), "prompt": ["x", "y"]}), path)
    assert [(row.id, row.prompt) for row in rows(path)] == [(1, "x"), (2, "y")]
    assert json.loads(json.dumps([row.id for row in rows(path)])) == [1, 2]


@pytest.mark.parametrize(
    "other",
    [b"one\nTWO\nthree\n", b"one\n", b"one\ntwo\nthree\nfour\n"],
    ids=["same length", "shorter", "longer"],
)
def test_a_file_that_is_changed_while_it_is_read_is_noticed(other: bytes, tmp_path: Path) -> None:
    path = written(tmp_path / "p.txt", b"one", b"two", b"three\n")
    found = PromptFile.look(str(path))
    with path.open("r+b") as file:
        file.write(other)
        file.truncate()
    with pytest.raises(
        BadInput, match=r"was changed while it was answered: row [24] is not what it was"
    ):
        list(found.rows())


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (b"", None),
        (b"  ", "empty_row"),
        (b"{", "broken_row"),
        (b"[" * 100_000, "broken_row"),
        (b'{"prompt": "\xff"}', "broken_row"),
        ([], "broken_row"),
        ({}, "broken_row"),
        ({"prompt": ""}, "empty_row"),
        ({"prompt": 3}, "broken_row"),
        ({"prompt": "x", "messages": CHAT}, "broken_row"),
        ({"prompt": CHAT}, "broken_row"),
        ({"messages": []}, "broken_row"),
        ({"messages": "x"}, "broken_row"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "broken_row"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "broken_row"),
        ({"messages": [{"role": "user"}]}, "broken_row"),
        ({"id": True, "prompt": "x"}, "broken_row"),
        ({"id": {}, "prompt": "x"}, "broken_row"),
        (b'{"id": NaN, "prompt": "x"}', "broken_row"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "broken_row",
        ),
    ],
)
def test_a_wrong_row_says_why(row: object, code: str | None, tmp_path: Path) -> None:
    if code is None:
        with pytest.raises(BadInput, match="has no row"):
            problem(row, tmp_path)
    else:
        assert problem(row, tmp_path) == code


def test_the_second_row_with_an_id_is_refused(tmp_path: Path) -> None:
    given = (
        {"id": "a", "prompt": "x"},
        {"id": "1", "prompt": "y"},
        {"id": 1, "prompt": "y"},
        {"id": "a", "prompt": "z"},
    )
    assert [row.problem for row in rows(written(tmp_path / "p.jsonl", *given))] == [
        None,
        None,
        None,
        ("duplicate_id", "row 1 has the same id 'a'"),
    ]


def test_a_line_that_is_too_long_is_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "LONGEST", 10)
    found = rows(written(tmp_path / "p.txt", b"a" * 10, b"b" * 35, b"c" * 11, b"d"))
    assert [row.problem and row.problem[0] for row in found] == [None, "too_long", "too_long", None]
    assert found[3].prompt == "d"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for name in (tmp_path, tmp_path / "none.jsonl", "builtin"):
        with pytest.raises(BadInput, match="no file of prompts"):
            PromptFile.look(str(name))
