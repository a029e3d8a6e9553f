"""Text that is missing, empty, of no fields, not UTF-8, cut off or without end; and tasks that are
no tasks.

Damaged and altered files by the thousand: the torment `hostile_inputs`. As a user meets them:
tests/moectl/commands/test_bad_input.py.
"""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from artifacts.errors import BadInput
from moectl.bench.other_tools import read_results
from profilers.text import files
from profilers.text.corpus import documents
from tests.helpers.corpora import refusal, texts, write


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("empty.txt", b"", "holds no text"),
        ("blank.txt", b" \n\t\n", "holds no text"),
        ("empty.jsonl", b"", "holds no text"),
        ("latin.txt", b"na\xefve", "latin.txt is not UTF-8 text (byte 2)"),
        ("bad.jsonl", b'{"text": "x"}\n{"text": ', "bad.jsonl:2: not JSON"),
        (
            "list.jsonl",
            b"[1]\n",
            "list.jsonl:1: a row must be an object with a field 'text', not list",
        ),
        ("none.jsonl", b'{"id": 1, "n": 2}', "none.jsonl:1: no text in the fields 'id', 'n'"),
        ("null.jsonl", b'{"text": null, "url": "x"}', "null.jsonl:1: no text in the fields"),
        ("none.parquet", [{"id": 1}], "none.parquet:1: no text in the fields 'id'"),
        ("bad.parquet", b"PAR1 and no more", "bad.parquet is not a whole parquet file"),
        ("plain.txt.gz", None, "plain.txt.gz is not a whole gzip file"),
        (
            "short.jsonl.gz",
            gzip.compress(b"{}" * 99, mtime=0)[:-9],
            "short.jsonl.gz is not a whole gzip file",
        ),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes | list | None, complaint: str) -> None:
    path = tmp_path / name
    if isinstance(content, list):
        write(path, content)
    else:
        path.write_bytes(b"no gzip" if content is None else content)
    assert complaint in refusal(path)


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "nowhere.txt",
        "wikitext",
        "builtin:all",
        "/no/such/folder",
        "~nobody-here/a.txt",
        "x" * 5000,
    ],
)
def test_unknown_data(spec: str) -> None:
    assert refusal(spec).startswith(f"no data at {spec!r}: give a text, jsonl or parquet file")


def test_patterns_and_empty_folders(tmp_path: Path) -> None:
    assert "patterns are not expanded" in refusal(tmp_path / "*.txt")
    assert "holds no text" in refusal(tmp_path)


def test_unknown_data_is_refused_before_it_is_read() -> None:
    with pytest.raises(BadInput):
        documents("nowhere.txt")


@pytest.mark.parametrize("spec", ["~\0", "~\ud800", "a\0b", "builtin:\ud800"])
def test_names_that_no_file_can_have(spec: str) -> None:
    assert refusal(spec).startswith(f"no data at {spec!r}")


def test_what_has_no_end_is_not_begun() -> None:
    assert "neither a file nor a folder" in refusal("/dev/zero")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"text": ' + "9" * 5000 + "}", "not JSON"),
        (r'{"text": "half of \ud83d"}', "half a character"),
        (r'{"question": "half of \ud83d"}', "half a character"),
    ],
)
def test_json_that_few_expect(tmp_path: Path, row: str, complaint: str) -> None:
    assert f"a.jsonl:1: {complaint}" in refusal(write(tmp_path / "a.jsonl", row)).replace(
        "not JSON (it is ", ""
    )


def test_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LONGEST", 20)
    assert texts(write(tmp_path / "a.jsonl", '{"text": "short"}\n')) == ["short"]
    assert "longer than 20 characters" in refusal(
        write(tmp_path / "a.jsonl", '{"text": "not so short"}')
    )


def test_ten_million_characters_in_a_line(tmp_path: Path) -> None:
    text = "x" * 10_000_000
    assert texts(write(tmp_path / "a.jsonl", json.dumps({"text": text}))) == [text]


def test_a_plain_text_without_end_is_cut_where_a_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LONGEST", 4)
    assert texts(write(tmp_path / "a.txt", "one\ntwo three\nfour")) == [
        "one\ntwo ",
        "three\n",
        "four",
    ]


def test_what_unpacks_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_UNPACKED", 100)
    assert "give it unpacked" in refusal(
        write(tmp_path / "a.parquet.gz", [{"text": "some"}] * 2000)
    )


def test_columns_that_python_has_no_value_for_are_not_read(tmp_path: Path) -> None:
    far = pa.array([2**62, 1], pa.timestamp("ns")), pa.array([2**31 - 1, 1], pa.date32())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"at": far[0], "day": far[1], "text": ["one", "two"]}), path)
    assert texts(path) == ["one", "two"]
    pq.write_table(
        pa.table(
            {"at": far[0], "q": ["one", "two"], "a": pa.array(["x", "y"]).dictionary_encode()}
        ),
        path,
    )
    assert texts(path) == ["one\nx", "two\ny"]
    pq.write_table(pa.table({"at": far[0]}), path)
    assert "a.parquet:1: no text in the fields 'at'" in refusal(path)


@pytest.mark.parametrize(
    "result",
    [
        '{"build_commit": "b", "n_prompt": 0, "n_gen": 8, "samples_ns": ["x"]}',
        '{"build_commit": "b", "n_prompt": 0, "n_gen": 8, "samples_ns": []}',
        '{"build_commit": "b", "n_prompt": 0, "n_gen": 8, "samples_ns": [0]}',
        '{"build_commit": "b", "n_prompt": 0, "n_gen": "many", "samples_ns": [1]}',
        '{"median_ttft_ms": null, "median_tpot_ms": 1, "output_throughput": 1}',
        '{"median_ttft_ms": NaN, "median_tpot_ms": 1, "output_throughput": 1}',
        "[" * 100_000,
    ],
)
def test_results_of_other_tools_that_are_none(tmp_path: Path, result: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(result)
    with pytest.raises(BadInput, match="give what `llama-bench"):
        read_results(path)
