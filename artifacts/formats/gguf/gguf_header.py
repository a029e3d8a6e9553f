"""The header of a GGUF file (ggml's docs/gguf.md): what it says of the model, and where its tensors
lie.

It is read without torch, and without an object for each word of a vocabulary.
"""

import hashlib
import mmap
import struct
from array import array
from functools import lru_cache
from math import prod
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

from artifacts.errors import BadInput

MAGIC = b"GGUF"
VERSIONS = (2, 3)


class GgmlType(NamedTuple):
    """Type of stored numbers: a block of `num_weights` numbers takes `nbytes` bytes."""

    name: str
    num_weights: int
    nbytes: int


PLAIN = (GgmlType("F32", 1, 4), GgmlType("F16", 1, 2), GgmlType("BF16", 1, 2))
INTEGERS = GgmlType("I32", 1, 4)  # of tables, as the experts of each token
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
    GgmlType("Q4_1", 32, 20),
    GgmlType("Q5_0", 32, 22),
    GgmlType("Q5_1", 32, 24),
    GgmlType("TQ1_0", 256, 54),
    GgmlType("TQ2_0", 256, 66),
    GgmlType("NVFP4", 64, 36),
    GgmlType("Q1_0", 128, 18),
    GgmlType("Q2_0", 64, 18),
    GgmlType("IQ1_S", 256, 50),
    GgmlType("IQ1_M", 256, 56),
    GgmlType("IQ2_XXS", 256, 66),
    GgmlType("IQ2_XS", 256, 74),
    GgmlType("IQ2_S", 256, 82),
    GgmlType("IQ3_XXS", 256, 98),
    GgmlType("IQ3_S", 256, 110),
)
TYPES = {each.name: each for each in (*PLAIN, *BLOCKS, INTEGERS)}
"""The types that are read."""

NAMES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
}
"""Names of types by their numbers, `enum ggml_type` in ggml.h."""
_START = "<IQQ"  # version, number of tensors, number of entries
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING = 8
_ARRAY = 9
_ALIGNMENT = 32  # bytes: where tensors begin, unless `general.alignment` says otherwise
# elements: of a longer array of numbers, which is one of a vocabulary, the header has the length
_COUNTED = 4096

# What a header may have at most, so that a hostile one is refused before it costs anything. The
# largest vocabularies have 300,000 tokens and 500,000 merges, the largest models some thousand
# tensors.
_MOST_NBYTES = 128 << 20
_MOST_ENTRIES = 1 << 16
_MOST_TENSORS = 1 << 16
_MOST_ELEMENTS = 1 << 22  # of all arrays together
_MOST_STRINGS = 1 << 21
_LONGEST_STRING = 4 << 20
_LONGEST_KEY = 1 << 16  # as the format has it
_LONGEST_NAME = 64  # of a tensor, as the format has it
_MOST_DIMENSIONS = 4
# bytes: a key and a value, a tensor without dimensions
_LEAST_ENTRY = 8 + 1 + 4 + 1
_LEAST_TENSOR = 8 + 4 + 4 + 8


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
    """The entries of a file, its tensors by name, and the sha256 of both.

    The entry of an array of strings, or of a long array of numbers, is its length. `read_array`
    reads its elements, and `arrays` holds the places of all arrays.
    """

    entries: dict[str, object]
    tensors: dict[str, GgufTensor]
    digest: bytes
    arrays: dict[str, "_Array"]


class _Array(NamedTuple):
    """Place of an array: the byte in the file where its elements begin, their type, and their
    number."""

    position: int
    kind: int
    count: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of the elements, which must be numbers."""
        return self.count * struct.calcsize(f"<{_NUMBERS[self.kind]}")


def read_header(path: Path) -> GgufHeader:
    """Read the header of a file. Raises BadInput for one that is missing, truncated, contradictory
    or no GGUF file, and for a tensor of a type that is not read."""
    try:
        status = path.stat()
        return _read(path, (status.st_size, status.st_mtime_ns))
    except FileNotFoundError as error:
        raise BadInput(
            f"{path} is missing: the model is in several files, so download this one too"
        ) from error
    except PermissionError as error:
        raise BadInput(f"{path} cannot be read: permission denied") from error
    except (ValueError, OSError, struct.error, OverflowError, MemoryError) as error:
        reason = shorten(str(error), 160)
        raise BadInput(
            f"{path} is truncated or no GGUF file ({reason}): download it again"
        ) from error


def has_header(head: bytes) -> bool:
    """Return whether the first bytes of a file hold all of its header, or can be no header's: then
    further bytes would say nothing more."""
    if not head.startswith(MAGIC) or len(head) > _MOST_NBYTES:
        return True
    reader = _Reader(head)
    try:
        _, num_tensors, num_entries = reader.start()
        reader.entries(num_entries)
        for _ in range(num_tensors):
            reader.tensor()
    except (ValueError, struct.error):
        return False
    return True


def read_array(path: Path, key: str) -> list[str] | array | None:
    """Return the elements of an array of a file's header; None if there is no such array.

    Raises BadInput as `read_header` does, and for strings that are not UTF-8.
    """
    place = read_header(path).arrays.get(key)
    if place is None:
        return None
    with _mapped(path) as mapped:
        reader = _Reader(mapped, place.position)
        try:
            if place.kind == _STRING:
                return [reader.string() for _ in range(place.count)]
            return reader.numbers(place.kind, place.count)
        except ValueError as error:
            raise BadInput(
                f"{path}: {key} is damaged ({shorten(str(error), 100)}): download it again"
            ) from error


@lru_cache(maxsize=64)  # an opening asks several times
def _read(path: Path, stamp: tuple[int, int]) -> GgufHeader:
    """Read the header of the file as of its `stamp`, whose first number is its bytes."""
    with _mapped(path) as mapped:
        reader = _Reader(mapped)
        version, num_tensors, num_entries = reader.start()
        entries = reader.entries(num_entries)
        alignment = entries.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise BadInput(
                f"{path} says general.alignment {str(alignment)[:30]}, which is no power of two: "
                "download it again"
            )
        listed = [reader.tensor() for _ in range(num_tensors)]
        with memoryview(mapped)[: reader.position] as header:
            digest = hashlib.sha256(header).digest()
    return GgufHeader(
        entries, _placed(path, listed, reader.position, stamp[0], alignment), digest, reader.arrays
    )


def _mapped(path: Path) -> mmap.mmap:
    """Map the part of a file that may be a header, without the numbers behind it, which can be more
    than a process may map."""
    with path.open("rb") as file:
        nbytes = min(path.stat().st_size, _MOST_NBYTES + 1)
        return mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)


_Listed = tuple[
    str, tuple[int, ...], int, int
]  # name, shape, number of the type, offset behind the header


def _placed(
    path: Path, listed: list[_Listed], header: int, end: int, alignment: int
) -> dict[str, GgufTensor]:
    """The tensors of a file of `end` bytes. Raises BadInput unless each begins where the one before
    it ends, at the next multiple of the alignment."""
    start = _aligned(header, alignment)
    tensors: dict[str, GgufTensor] = {}
    expected = 0
    for name, shape, number, offset in listed:
        if name in tensors:
            raise BadInput(f"{path} has two tensors of one name, {name!r}: download it again")
        tensor = _tensor(path, name, shape, number, start + offset)
        if offset != expected:
            raise BadInput(
                f"{path}: {name} begins at byte {offset:,} of the tensors, not at {expected:,}, "
                "where the one before it ends: it is damaged, download it again"
            )
        if tensor.offset + tensor.nbytes > end:
            raise BadInput(f"{path} ends within {name}: it is truncated, download it again")
        expected += _aligned(tensor.nbytes, alignment)
        tensors[name] = tensor
    return tensors


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _tensor(
    path: Path, name: str, shape: tuple[int, ...], number: int, position: int
) -> GgufTensor:
    shown = NAMES.get(number, f"the unknown type {number}")
    if shown not in TYPES:
        raise BadInput(
            f"{path}: {name} is {shown}, which moectl does not read: take a file in another "
            "quantisation, docs/models.md has the types"
        )
    tensor = GgufTensor(name, shape, TYPES[shown], position)
    if prod(shape[-1:]) % tensor.type.num_weights:
        raise BadInput(f"{path}: {name} has rows of {shape[-1:]} in {shown}: download it again")
    return tensor


class _Reader:
    """Reads one value after the other, and nothing larger than a header may have. Raises
    ValueError."""

    def __init__(self, mapped: mmap.mmap | bytes, position: int = 0) -> None:
        self._mapped = mapped
        self.position = position
        self.arrays: dict[str, _Array] = {}
        self._num_strings = 0
        self._num_elements = 0

    def start(self) -> tuple[int, int, int]:
        """The version, and the numbers of tensors and of entries."""
        if self._mapped[: len(MAGIC)] != MAGIC:
            raise ValueError(f"it does not begin with {MAGIC.decode()}")
        self.position = len(MAGIC)
        version, num_tensors, num_entries = self._values(_START)
        if version not in VERSIONS:
            raise ValueError(f"it is of version {version}, and {VERSIONS} are read")
        self._check("tensors", num_tensors, _MOST_TENSORS, _LEAST_TENSOR)
        self._check("entries", num_entries, _MOST_ENTRIES, _LEAST_ENTRY)
        return version, num_tensors, num_entries

    def entries(self, count: int) -> dict[str, object]:
        entries: dict[str, object] = {}
        for _ in range(count):
            key = self.name(_LONGEST_KEY)
            if not key or key in entries:
                raise ValueError(
                    f"it has the entry {key[:80]!r} twice"
                    if key
                    else "it has an entry without a name"
                )
            entries[key] = self._value(key, *self._values("<I"))
        return entries

    def tensor(self) -> _Listed:
        name = self.name(_LONGEST_NAME)
        (num_dimensions,) = self._values("<I")
        if num_dimensions > _MOST_DIMENSIONS:
            raise ValueError(
                f"{name!r} has {num_dimensions:,} dimensions: {_MOST_DIMENSIONS} are read at most"
            )
        *shape, kind, offset = self._values(f"<{num_dimensions}QIQ")
        return name, tuple(reversed(shape)), kind, offset

    def string(self, longest: int = _LONGEST_STRING) -> str:
        (length,) = self._values("<Q")
        if length > longest:
            raise ValueError(
                f"it has a string of {length:,} bytes, and at most {longest:,} are read"
            )
        start = self.position
        self._advance(length)
        return self._mapped[start : self.position].decode()

    def name(self, longest: int) -> str:
        """A name that a message can hold."""
        name = self.string(longest)
        if not name.isprintable():
            raise ValueError(f"it has the name {name[:80]!r}")
        return name

    def numbers(self, kind: int, count: int) -> array:
        numbers = array(_NUMBERS[kind].replace("?", "B"))
        start = self.position
        self._advance(count * numbers.itemsize)
        numbers.frombytes(self._mapped[start : self.position])
        return numbers

    def _value(self, key: str, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key)
        return self._values(f"<{self._number(kind)}")[0]

    def _array(self, key: str) -> list | int:
        """The elements of a short array of numbers, of any other their count; its place is in
        `arrays`."""
        kind, count = self._values("<IQ")
        self.arrays[key] = _Array(self.position, kind, count)
        if kind == _STRING:
            self._check("strings", self._num_strings + count, _MOST_STRINGS, 8)
            self._num_strings += count
            self._skip_strings(count)
            return count
        form = self._number(kind)
        self._check("numbers", self._num_elements + count, _MOST_ELEMENTS, 1)
        self._num_elements += count
        if count <= _COUNTED:
            return list(self._values(f"<{count}{form}"))
        self._advance(self.arrays[key].nbytes)
        return count

    def _skip_strings(self, count: int) -> None:
        length_at = struct.Struct("<Q").unpack_from
        position = self.position
        for _ in range(count):
            position += 8 + length_at(self._mapped, position)[0]
        self._advance(position - self.position)

    def _values(self, form: str) -> tuple:
        found = struct.unpack_from(form, self._mapped, self.position)
        self._advance(struct.calcsize(form))
        return found

    def _advance(self, nbytes: int) -> None:
        self.position += nbytes
        if self.position > len(self._mapped):
            raise ValueError("it ends within its header")
        if self.position > _MOST_NBYTES:
            raise ValueError(f"its header has more than {_MOST_NBYTES >> 20} MiB")

    def _check(self, what: str, count: int, most: int, least_nbytes: int) -> None:
        if count > most:
            raise ValueError(f"it says that it has {count:,} {what}, and at most {most:,} are read")
        if count * least_nbytes > len(self._mapped):
            raise ValueError(f"it says that it has {count:,} {what}, and is too small for them")

    def _number(self, kind: int) -> str:
        if kind not in _NUMBERS:
            what = "an array of arrays" if kind == _ARRAY else f"a value of the unknown type {kind}"
            raise ValueError(f"it has {what}")
        return _NUMBERS[kind]
