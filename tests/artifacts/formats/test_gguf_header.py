"""A GGUF header is read whole or refused, and a hostile one costs nothing before it is refused."""

import struct
import tracemalloc
from pathlib import Path

import pytest

from artifacts.errors import BadInput
from artifacts.formats.gguf.gguf_header import read_array, read_header

UINT8 = 0
UINT32 = 4
STRING = 8
ARRAY = 9
F32 = 0
ALIGNMENT = b"general.alignment"


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, value: int = 1) -> bytes:
    return text(key) + struct.pack("<II", UINT32, value)


def tensor(name: bytes, *shape: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, F32, offset)


def file(
    path: Path,
    entries: list[bytes],
    tensors: list[bytes],
    *,
    nbytes: int = 256,
    alignment: int = 32,
) -> Path:
    header = (
        b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries + tensors)
    )
    path.write_bytes(header + bytes(-len(header) % alignment + nbytes))
    return path


def test_tensors_lie_one_behind_another(tmp_path: Path) -> None:
    path = file(
        tmp_path / "m.gguf",
        [entry(b"a", 7)],
        [tensor(b"x", 3, 2), tensor(b"y", 5, offset=32)],
        nbytes=52,
    )
    header = read_header(path)
    assert header.entries == {"a": 7}
    assert [(each.shape, each.nbytes) for each in header.tensors.values()] == [
        ((2, 3), 24),
        ((5,), 20),
    ]
    assert header.tensors["y"].offset == path.stat().st_size - 20
    aligned = [entry(ALIGNMENT, 64)], [tensor(b"x", 3), tensor(b"y", 5, offset=64)]
    assert len(read_header(file(tmp_path / "n.gguf", *aligned, alignment=64)).tensors) == 2


X = tensor(b"x", 8)
Y = tensor(b"y", 8, offset=32)
DAMAGED = {
    "overlapping": (
        [],
        [X, tensor(b"y", 8, offset=0)],
        "y begins at byte 0 of the tensors, not at 32",
    ),
    "not aligned": ([], [X, tensor(b"y", 8, offset=36)], "y begins at byte 36"),
    "a hole": ([], [X, tensor(b"y", 8, offset=64)], "y begins at byte 64"),
    "a hole before the first": (
        [],
        [tensor(b"x", 8, offset=32)],
        "x begins at byte 32 of the tensors, not at 0",
    ),
    "out of order": ([], [Y, X], "y begins at byte 32 of the tensors, not at 0"),
    "of another alignment": (
        [entry(ALIGNMENT, 64)],
        [X, Y],
        "y begins at byte 32 of the tensors, not at 64",
    ),
    "a key twice": ([entry(b"a"), entry(b"b"), entry(b"a")], [], "the entry 'a' twice"),
    "no key": ([entry(b"")], [], "an entry without a name"),
    "a tensor twice": ([], [X, tensor(b"x", 8, offset=32)], "two tensors of one name, 'x'"),
    "alignment of 0": ([entry(ALIGNMENT, 0)], [X], "general.alignment 0, which is no power of two"),
    "alignment of 48": (
        [entry(ALIGNMENT, 48)],
        [X],
        "general.alignment 48, which is no power of two",
    ),
    "nested arrays": (
        [text(b"a") + struct.pack("<IIQ", ARRAY, ARRAY, 1)],
        [],
        "an array of arrays",
    ),
    "an unknown type": ([text(b"a") + struct.pack("<I", 77)], [], "a value of the unknown type 77"),
}


@pytest.mark.parametrize(("entries", "tensors", "message"), DAMAGED.values(), ids=DAMAGED)
def test_what_contradicts_itself_is_refused(
    tmp_path: Path, entries: list, tensors: list, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        read_header(file(tmp_path / "m.gguf", entries, tensors))


def array(of: int, count: int) -> bytes:
    return struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<IIQ", ARRAY, of, count)


HOSTILE = {
    "numbers": (array(UINT8, 2 * 10**9), "2,000,000,000 numbers, and at most"),
    "strings": (array(STRING, 10**9), "1,000,000,000 strings, and at most"),
    "strings that are all empty": (array(STRING, 2 * 10**6), "of None"),
    "entries": (struct.pack("<QQ", 0, 10**9), "1,000,000,000 entries, and at most"),
    "tensors": (struct.pack("<QQ", 10**8, 0), "100,000,000 tensors, and at most"),
    "dimensions": (
        struct.pack("<QQ", 1, 0) + text(b"a") + struct.pack("<I", 10**8),
        "100,000,000 dimensions",
    ),
    "a string": (
        struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<IQ", STRING, 3 * 10**9),
        "a string of 3,000,000,000 bytes",
    ),
    "a key": (struct.pack("<QQQ", 0, 1, 3 * 10**9), "a string of 3,000,000,000 bytes"),
    "strings beyond all": (array(STRING, 2) + struct.pack("<Q", 2**63), "GGUF file"),
}


@pytest.mark.parametrize(("start", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_costs_little(tmp_path: Path, start: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    with path.open("wb") as sparse:
        sparse.write(b"GGUF" + struct.pack("<I", 3) + start)
        sparse.truncate(13 * 10**9)
    if message == "of None":  # within the bounds, and read
        assert read_header(path).entries == {"a": 2 * 10**6}
        return
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match=message) as refused:
            read_header(path)
        assert "\n" not in str(refused.value)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_arrays_of_a_vocabulary_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    words = [f"w{i}ä" for i in range(3)]
    of_words = (
        text(b"words")
        + struct.pack("<IIQ", ARRAY, STRING, 3)
        + b"".join(text(w.encode()) for w in words)
    )
    of_numbers = (
        text(b"numbers")
        + struct.pack("<IIQ", ARRAY, UINT32, 5000)
        + struct.pack("<5000I", *range(5000))
    )
    few = text(b"few") + struct.pack("<IIQ", ARRAY, UINT32, 2) + struct.pack("<2I", 8, 9)
    path = file(tmp_path / "m.gguf", [of_words, of_numbers, few, entry(b"last", 3)], [])
    assert read_header(path).entries == {"words": 3, "numbers": 5000, "few": [8, 9], "last": 3}
    assert read_array(path, "words") == words
    assert list(read_array(path, "numbers")) == list(range(5000))
    assert read_array(path, "few") is read_array(path, "none") is None


def test_strings_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = file(
        tmp_path / "m.gguf",
        [text(b"a") + struct.pack("<IIQ", ARRAY, STRING, 1) + text(b"\xff")],
        [],
    )
    assert read_header(path).entries == {"a": 1}
    with pytest.raises(BadInput, match="a is damaged"):
        read_array(path, "a")
