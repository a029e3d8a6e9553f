"""The header of a GGUF file (ggml's docs/gguf.md): what it says of the model, and where its tensors lie.

It is read without torch, and without an object for each word of a vocabulary.
"""

import hashlib
import mmap
import struct
from functools import lru_cache
from math import prod
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

from artifacts.errors import BadInput

MAGIC = b"GGUF"
VERSIONS = (2, 3)


class GgmlType(NamedTuple):
    """How numbers are stored: `nbytes` hold a block of so many."""

    name: str
    num_weights: int
    nbytes: int


PLAIN = (GgmlType("F32", 1, 4), GgmlType("F16", 1, 2), GgmlType("BF16", 1, 2))
BLOCKS = (
    GgmlType("Q8_0", 32, 34),
    GgmlType("Q4_0", 32, 18),
    GgmlType("Q4_K", 256, 144),
    GgmlType("Q5_K", 256, 176),
    GgmlType("Q6_K", 256, 210),
    GgmlType("MXFP4", 32, 17),
    GgmlType("Q2_K", 256, 84),
    GgmlType("Q3_K", 256, 110),
    GgmlType("IQ4_NL", 32, 18),
    GgmlType("IQ4_XS", 256, 136),
)
TYPES = {each.name: each for each in (*PLAIN, *BLOCKS)}
"""The types that are read."""

_NAMES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K"}
_NAMES |= {13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"}
_NAMES |= {22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 30: "BF16", 39: "MXFP4", 40: "NVFP4"}  # enum ggml_type in ggml.h
_START = "<IQQ"  # version, number of tensors, number of entries
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32  # bytes: where tensors begin, unless `general.alignment` says otherwise


class GgufTensor(NamedTuple):
    """One tensor of numbers in this shape; its offset counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.type.num_weights * self.type.nbytes


class GgufHeader(NamedTuple):
    """The entries of a file (of an array of strings its length), its tensors by name, and the sha256 of both."""

    entries: dict[str, object]
    tensors: dict[str, GgufTensor]
    digest: bytes


def read_header(path: Path) -> GgufHeader:
    """Read the header of a file. Raises BadInput for one that is missing, truncated, or no GGUF file, and for a tensor
    of a type that is not read."""
    try:
        status = path.stat()
        return _read(path, (status.st_size, status.st_mtime_ns))
    except FileNotFoundError as error:
        raise BadInput(f"{path} is missing: the model is in several files, so download this one too") from error
    except PermissionError as error:
        raise BadInput(f"{path} cannot be read: permission denied") from error
    except (ValueError, OSError, struct.error, OverflowError, MemoryError) as error:
        reason = shorten(str(error), 160)
        raise BadInput(f"{path} is truncated or no GGUF file ({reason}): download it again") from error


@lru_cache(maxsize=64)  # an opening asks several times
def _read(path: Path, stamp: tuple[int, int]) -> GgufHeader:
    """Read the header of the file as of its `stamp`, whose first number is its bytes."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        reader = _Reader(mapped)
        version, num_tensors, num_entries = reader.values(_START)
        if version not in VERSIONS:
            raise ValueError(f"it is of version {version}, and {VERSIONS} are read")
        entries = {reader.string(): reader.value(*reader.values("<I")) for _ in range(num_entries)}
        listed = [reader.tensor() for _ in range(num_tensors)]
        digest = hashlib.sha256(mapped[: reader.position]).digest()
    alignment = entries.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment <= 0:
        raise BadInput(f"{path} says general.alignment {str(alignment)[:30]}: download it again")
    start = -(-reader.position // alignment) * alignment
    tensors = {name: _placed(path, name, *others, start=start, end=stamp[0]) for name, *others in listed}
    if len(tensors) < num_tensors:
        raise BadInput(f"{path} has two tensors of one name: download it again")
    return GgufHeader(entries, tensors, digest)


def _placed(
    path: Path, name: str, shape: tuple[int, ...], number: int, offset: int, *, start: int, end: int
) -> GgufTensor:
    shown = _NAMES.get(number, f"the unknown type {number}")
    if shown not in TYPES:
        raise BadInput(f"{path}: {name} is {shown}, and moectl reads {', '.join(TYPES)}: take a file of these types")
    tensor = GgufTensor(name, shape, TYPES[shown], start + offset)
    if prod(shape[-1:]) % tensor.type.num_weights:
        raise BadInput(f"{path}: {name} has rows of {shape[-1:]} in {shown}: download it again")
    if tensor.offset + tensor.nbytes > end:
        raise BadInput(f"{path} ends within {name}: it is truncated, download it again")
    return tensor


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

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, number of the type, and the offset behind the header."""
        name, (num_dimensions,) = self.string(), self.values("<I")
        *shape, kind, offset = self.values(f"<{num_dimensions}QIQ")
        return name, tuple(reversed(shape)), kind, offset

    def _number(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise ValueError(f"it has a value of the unknown type {kind}")
        return _NUMBERS[kind]
