"""The header of a GGUF file (ggml's docs/gguf.md): what it says of the model, and its tensors.

It is read without torch, and without an object for each word of a vocabulary.
"""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

MAGIC = b"GGUF"
VERSIONS = (2, 3)


class StoredType(NamedTuple):
    """A type of tensors that is read, by its name; weights and bytes of a block."""

    name: str
    num_weights: int
    nbytes: int


PLAIN = {0: StoredType("float32", 1, 4), 1: StoredType("float16", 1, 2), 30: StoredType("bfloat16", 1, 2)}
BLOCKS = {
    2: StoredType("Q4_0", 32, 18),
    8: StoredType("Q8_0", 32, 34),
    12: StoredType("Q4_K", 256, 144),
    13: StoredType("Q5_K", 256, 176),
    14: StoredType("Q6_K", 256, 210),
    39: StoredType("MXFP4", 32, 17),
}
"""By ggml's number of it (enum ggml_type in ggml.h); plain numbers by torch's name of them."""

_ALIGNMENT = 32  # bytes: where tensors begin, unless `general.alignment` says otherwise
_START = "<IQQ"  # version, number of tensors, number of entries
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufTensor(NamedTuple):
    """One tensor; its offset counts from the `start` of the header that names it."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class GgufHeader(NamedTuple):
    """The entries of a file (of an array of strings its length), its tensors, the bytes of both, and where the first
    tensor begins."""

    entries: dict[str, object]
    tensors: list[GgufTensor]
    content: bytes
    start: int


def read_header(path: Path) -> GgufHeader:
    """Read the header of a file. Raises ValueError, OSError, struct.error or OverflowError for what is none."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        reader = _Reader(mapped)
        version, num_tensors, num_entries = reader.values(_START)
        if version not in VERSIONS:
            raise ValueError(f"it is of version {version}, and {VERSIONS} are read")
        entries = {reader.string(): reader.value(*reader.values("<I")) for _ in range(num_entries)}
        tensors = [reader.tensor() for _ in range(num_tensors)]
        alignment = entries.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment <= 0:
            raise ValueError(f"it says general.alignment {str(alignment)[:30]}")
        content = mapped[: reader.position]
        return GgufHeader(entries, tensors, content, -(-len(content) // alignment) * alignment)


class _Reader:
    """Reads one value after the other."""

    def __init__(self, mapped: mmap.mmap) -> None:
        if mapped[: len(MAGIC)] != MAGIC:
            raise ValueError(f"it does not begin with {MAGIC.decode()}")
        self._mapped, self.position = mapped, len(MAGIC)

    def values(self, form: str) -> tuple:
        found = struct.unpack_from(form, self._mapped, self.position)
        self.position += struct.calcsize(form)
        return found

    def string(self) -> str:
        (length,) = self.values("<Q")
        start, self.position = self.position, self.position + length
        if self.position > len(self._mapped):
            raise ValueError("it ends within a string")
        return self._mapped[start : self.position].decode()

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.values(f"<{self._number(kind)}")[0]
        of, count = self.values("<IQ")
        if of != _STRING:
            return list(self.values(f"<{count}{self._number(of)}"))
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", self._mapped, self.position)
            self.position += 8 + length
        return count

    def tensor(self) -> GgufTensor:
        name, (num_dimensions,) = self.string(), self.values("<I")
        *shape, kind, offset = self.values(f"<{num_dimensions}QIQ")
        return GgufTensor(name, tuple(reversed(shape)), kind, offset)

    def _number(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise ValueError(f"it has a value of the unknown type {kind}")
        return _NUMBERS[kind]
