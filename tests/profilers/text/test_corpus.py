"""Every form of a data specification, and how text is cut into sequences.

Bad files and names are tested in tests/faults/test_13_data.py.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from artifacts.errors import BadInput, BadUsage
from profilers.text.corpus import PIECE, Document, data_digest, documents, token_sequences
from profilers.text.hub import parsed
from tests.helpers.corpora import refusal, texts, write

ROWS = [
    {"question": "How many?", "answer": "Four.", "id": 1},
    {"question": "Why?", "answer": "Because.", "id": 2},
]
JOINED = ["How many?\nFour.", "Why?\nBecause."]


def characters(text: str, *, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
    """A tokenizer with a token per character."""
    assert not add_special_tokens
    return {"input_ids": [ord(character) for character in text]}


def cut(*given: str, length: int, num_tokens: int) -> list[str]:
    sequences = token_sequences(
        [Document("", text) for text in given], characters, length=length, num_tokens=num_tokens
    )
    return ["".join(map(chr, sequence)) for sequence in sequences]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a", "a.rst.gz"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    assert texts(write(tmp_path / name, "Zwölf\n\n\nBoxkämpfer\n")) == ["Zwölf\n\n\nBoxkämpfer\n"]


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.txt", b"\xef\xbb\xbfhello")) == ["hello"]


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.parquet", "a.parquet.gz", "A.JSONL"]
)
def test_a_row_is_one_document(tmp_path: Path, name: str) -> None:
    assert texts(write(tmp_path / name, ROWS)) == JOINED


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_the_field_text_goes_alone(tmp_path: Path, name: str) -> None:
    assert texts(write(tmp_path / name, [{"source": "web", "text": "only this"}])) == ["only this"]


def test_blank_lines_and_blank_documents_are_left_out(tmp_path: Path) -> None:
    assert texts(
        write(tmp_path / "a.jsonl", '{"text": "one"}\n\n{"text": " "}\n{"text": "two"}')
    ) == ["one", "two"]


def test_a_folder_is_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".cache").mkdir()
    for name, text in {
        "c.txt": "third",
        "a.txt": "first",
        "b/x.md": "second",
        ".hidden": "no",
        ".cache/y": "no",
    }.items():
        write(tmp_path / name, text)
    assert texts(tmp_path) == ["first", "second", "third"]


@pytest.mark.parametrize("name", ["builtin", "hf:gsm8k"])
def test_an_existing_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert texts(write(Path(name), "mine")) == ["mine"]


def test_an_edited_file_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "old"}])
    assert texts(path) == ["old"]
    stamp = path.stat()
    write(path, [{"text": "new"}])
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert texts(path) == ["new"]


def test_builtin_is_fixed_by_its_seed() -> None:
    def first(seed: int) -> list[Document]:
        return list(itertools.islice(documents("builtin", seed=seed), 3))

    assert first(0) == first(0)
    assert first(0) != first(1)


def test_held_out_docstrings_are_apart() -> None:
    held_out = {document.name: document.text for document in documents("builtin:held-out")}
    assert "Simple JSON <https://json.org> decoder" in held_out["json.decoder"]
    assert not held_out.keys() & {
        document.name for document in itertools.islice(documents("builtin"), 50)
    }


def test_hub_names() -> None:
    assert parsed("hf:org/name") == ("org/name", None, "train")
    assert parsed("hf:org/name:main:test") == ("org/name", "main", "test")
    assert parsed("hf:org/name::test") == ("org/name", None, "test")


@pytest.mark.parametrize("spec", ["hf:", "hf::main", "hf:a:b:c:d"])
def test_bad_hub_names(spec: str) -> None:
    assert "write hf:name[:config[:split]]" in refusal(spec)


def test_data_sets_are_streamed(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", ROWS)
    write(tmp_path / "set" / "test.jsonl", ROWS[1:])
    assert texts(f"hf:{tmp_path}/set") == JOINED
    assert texts(f"hf:{tmp_path}/set::test") == JOINED[1:]
    assert "cannot be loaded" in refusal(f"hf:{tmp_path}/set::dev")


def test_data_sets_out_of_reach(tmp_path: Path) -> None:
    assert "Couldn't reach" in refusal("hf:org/name:main:test")
    write(tmp_path / "train.jsonl", '{"text": "one"}\n{"text": ')
    assert "check the name" in refusal(f"hf:{tmp_path}")


def test_documents_are_cut_at_the_length() -> None:
    assert cut("abcdefg", "hi", length=3, num_tokens=99) == ["abc", "def", "hi"]


def test_tokens_end_at_their_number() -> None:
    assert cut("abcdefg", "hijk", length=3, num_tokens=6) == ["abc", "def"]
    assert cut("abcdefg", "hijk", length=3, num_tokens=8) == ["abc", "def", "hi"]
    assert cut("abcdefg", "hijk", length=3, num_tokens=7) == ["abc", "def"]


def test_no_more_documents_are_read_than_needed() -> None:
    def endless() -> Iterator[Document]:
        return (Document(str(number), "abcd") for number in itertools.count())

    assert len(list(token_sequences(endless(), characters, length=4, num_tokens=40))) == 10


def test_long_text_is_tokenised_in_pieces() -> None:
    text = ("x" * 99 + "\n") * (PIECE // 100 + 2)
    sequences = cut(text, "y" * (PIECE + 5), length=PIECE, num_tokens=9 * PIECE)
    assert [len(sequence) for sequence in sequences] == [PIECE // 100 * 100, 200, PIECE, 5]
    assert "".join(sequences) == text + "y" * (PIECE + 5)


def test_sequences_are_int64() -> None:
    (sequence,) = token_sequences([Document("", "abc")], characters, length=8, num_tokens=8)
    assert sequence.dtype == np.int64


def test_no_token_at_all() -> None:
    with pytest.raises(BadInput, match="no document of two tokens or more"):
        cut("a", "b", length=8, num_tokens=8)
    with pytest.raises(BadUsage, match="at least 2 tokens"):
        cut("abc", length=1, num_tokens=8)


def test_digest_knows_tokens_and_boundaries() -> None:
    def digest(*sequences: list[int]) -> str:
        return data_digest([np.array(sequence, dtype=np.int64) for sequence in sequences])

    assert digest([1, 2], [3]) == digest([1, 2], [3])
    assert (
        len(
            {
                digest([1, 2], [3]),
                digest([1, 2, 3]),
                digest([1], [2, 3]),
                digest([3], [1, 2]),
                digest(),
            }
        )
        == 5
    )
    assert len(digest()) == 64


def test_the_module_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "datasets", "pyarrow"}
    code = f"import sys, profilers.text.corpus; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
