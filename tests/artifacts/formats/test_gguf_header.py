"""A GGUF header is read whole or refused, and a hostile one costs nothing before it is refused."""

import os
import struct
import tracemalloc
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from artifacts.errors import BadInput
from artifacts.formats.gguf.ggml import GGML
from artifacts.formats.gguf.gguf_header import NAMES, TYPES, _read, read_array, read_header
from tools.torments.hostile import damaged, refusal

UINT8 = 0
UINT32 = 4
STRING = 8
ARRAY = 9
F32 = 0
NUMBERS = {name: number for number, name in NAMES.items()}
NEWEST = (
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "Q4_1", "Q5_0", "Q5_1"),
    *("TQ1_0", "TQ2_0", "NVFP4", "Q1_0", "Q2_0"),
)
ALIGNMENT = b"general.alignment"


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, value: int = 1) -> bytes:
    return text(key) + struct.pack("<II", UINT32, value)


def tensor(name: bytes, *shape: int, offset: int = 0, kind: int = F32) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


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
    assert list(read_array(path, "few")) == [8, 9]
    assert read_array(path, "none") is None


def test_strings_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = file(
        tmp_path / "m.gguf",
        [text(b"a") + struct.pack("<IIQ", ARRAY, STRING, 1) + text(b"\xff")],
        [],
    )
    assert read_header(path).entries == {"a": 1}
    with pytest.raises(BadInput, match="a is damaged"):
        read_array(path, "a")


def read_whole(content: bytes) -> None:
    """Read the header and all packed numbers of a file with this content, which is in memory."""
    descriptor = os.memfd_create("mutant")
    try:
        os.write(descriptor, content)
        _read.cache_clear()  # which knows a file by its size and time
        header = read_header(Path(f"/proc/self/fd/{descriptor}"))
    finally:
        os.close(descriptor)
    for tensor in header.tensors.values():
        form = GGML.get(tensor.type.name)
        if form and tensor.nbytes:
            stored = np.frombuffer(bytearray(content), np.uint8, tensor.nbytes, tensor.offset)
            form.dequantise({"blocks": torch.from_numpy(stored).view(-1, form.nbytes)})


@pytest.mark.parametrize("name", NEWEST)
def test_a_mutant_is_read_or_refused_in_one_line(tmp_path: Path, name: str) -> None:
    nbytes = 512 // TYPES[name].num_weights * TYPES[name].nbytes
    end = -(-nbytes // 32) * 32
    words = text(b"words") + struct.pack("<IIQ", ARRAY, STRING, 2) + text(b"a") + text(b"b")
    whole = file(
        tmp_path / "whole.gguf",
        [entry(b"a"), words],
        [tensor(b"x", 256, 2, kind=NUMBERS[name]), tensor(b"y", 5, offset=end)],
        nbytes=end + 32,
    ).read_bytes()
    read_whole(whole)
    header = whole[: -end - 32]
    random = Random(name)
    refused = []
    for _ in range(500):
        content = damaged(header, random) + whole[len(header) :]
        refused += [refusal(name, partial(read_whole, content))]
    told = [str(each) for each in refused if each]
    assert 200 < len(told) < 490
    assert all(each.isprintable() and len(each) < 500 for each in told)
