"""One expert at several precisions in one safetensors file: written whole or not at all, always
with the same bytes.

Tensors are called `{bits}.{part}.qweight`, `.qzeros`, `.scales` and `{bits}.{part}_bias`, or as
`artifacts.quantisation.trellis.trellis` calls its parts. The tensors of one width lie side by side,
so that one read fetches a width. The metadata holds all that a stopped run needs to resume, with a
digest of the metadata and tensors.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from artifacts.common.files import replacing
from artifacts.common.untrusted import parse_json
from artifacts.errors import BadInput, OutOfResources, shortage
from artifacts.quantisation.replica_parts import Parts, assembled, described, is_trellis, named
from artifacts.quantisation.widths import Width, as_width, label

FORMAT = "moectl-replica-2"
TRELLIS_FORMAT = "moectl-trellis-1"
SOURCE = "source"  # in the metadata: the sha256 of the expert that the replicas are made of
_DIGEST = "digest"
_HEADER_LIMIT = 100 << 20  # bytes, as in the safetensors format
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32}
_DTYPES |= {"I16": torch.int16, "U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Header:
    """Header of a file; entries count bytes from `data_start`."""

    metadata: dict[str, str]
    entries: dict[str, _Entry]
    data_start: int


def replica_root(store_path: Path) -> Path:
    """The folder beside a store that holds its replicas; the column `file` of `replicas` is
    relative to it."""
    return store_path.with_name(f"{store_path.name}.replicas")


def write_replicas(
    path: Path, replicas: Mapping[Width, Parts], metadata: Mapping[str, str]
) -> None:
    """Write one expert's replicas by width, each a Packed or a Trellis per projection and its
    biases unquantised.

    Raises OutOfResources when the disk is full and BadInput when the file cannot be written; then
    no file is left.
    """
    tensors = [(name, tensor.contiguous().cpu()) for name, tensor in named(replicas)]
    meta = {
        "format": TRELLIS_FORMAT if is_trellis(replicas) else FORMAT,
        **metadata,
        **described(replicas),
    }
    meta[_DIGEST] = _digest(meta, tensors)
    entries = {}
    offset = 0
    for name, tensor in tensors:
        stop = offset + tensor.nbytes
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    header = json.dumps(
        {"__metadata__": dict(sorted(meta.items())), **entries}, separators=(",", ":")
    ).encode()
    header += b" " * (-len(header) % 8)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, tensor in tensors:
            file.write(_raw(tensor))


def read_replica(
    path: Path, bits: Width, *, model: str | None = None, key: tuple[int, int] | None = None
) -> Parts:
    """Read one width of an expert: a Packed or a Trellis per projection, biases as tensors; all are
    views of one buffer in memory.

    `model` is the fingerprint, and `key` the layer and expert, that the file must belong to. Raises
    BadInput for a file that is missing, truncated, foreign or of another expert, and for a width
    that the file lacks.
    """
    header = _read_header(path)
    check_identity(path, header.metadata, model=model, key=key)
    of_width = {
        name: entry for name, entry in header.entries.items() if name.startswith(f"{label(bits)}.")
    }
    if not of_width:
        raise BadInput(
            f"{path} has no {bits}-bit replica, only {', '.join(map(str, widths(header.metadata)))}"
        )
    start = min(entry.start for entry in of_width.values())
    stop = max(entry.stop for entry in of_width.values())
    if any((entry.start - start) % entry.dtype.itemsize for entry in of_width.values()):
        raise _foreign(path, "its tensors lie across the borders of their types")
    buffer = torch.from_numpy(_read(path, header.data_start + start, stop - start))
    tensors = {
        name.partition(".")[2]: buffer[entry.start - start : entry.stop - start]
        .view(entry.dtype)
        .view(entry.shape)
        for name, entry in of_width.items()
    }
    try:
        return assembled(bits, tensors, header.metadata)
    except ValueError as error:
        raise _foreign(path, str(error)) from error


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a whole file. Raises BadInput as `read_replica` does."""
    return _read_header(path).metadata


def check_identity(
    path: Path,
    metadata: Mapping[str, str],
    *,
    model: str | None = None,
    key: tuple[int, int] | None = None,
) -> None:
    """Raise BadInput unless the metadata are of this format and, where they are given, of the model
    with this fingerprint and of this layer and expert."""
    _check_format(path, metadata)
    if model is not None and metadata.get("model") != model:
        raise BadInput(f"{path} holds replicas of another model: run moectl quantize again")
    if key is not None and (metadata.get("layer"), metadata.get("expert")) != tuple(map(str, key)):
        raise BadInput(
            f"{path} holds another expert than layer {key[0]}, expert {key[1]}: run moectl "
            "quantize again"
        )


def widths(metadata: Mapping[str, str]) -> list[Width]:
    """The widths that a file holds, by its metadata."""
    return [as_width(bits) for bits in metadata["bits"].split(",")]


def replica_nbytes(path: Path) -> dict[Width, int]:
    """Bytes of the tensors of each width."""
    header = _read_header(path)
    totals = {label(bits): 0 for bits in widths(header.metadata)}
    for name, entry in header.entries.items():
        totals[name.partition(".")[0]] += entry.stop - entry.start
    return {as_width(text.replace("_", ".")): total for text, total in totals.items()}


def is_intact(path: Path) -> bool:
    """Return whether all bytes of tensors and metadata are as written, by the digest in the
    file."""
    header = _read_header(path)
    data = _read(
        path, header.data_start, max((entry.stop for entry in header.entries.values()), default=0)
    )
    tensors = [
        (name, torch.from_numpy(data[entry.start : entry.stop]).view(entry.dtype).view(entry.shape))
        for name, entry in header.entries.items()
    ]
    metadata = {name: text for name, text in header.metadata.items() if name != _DIGEST}
    return header.metadata.get(_DIGEST) == _digest(metadata, tensors)


def file_hash(path: Path) -> str:
    """sha256 of the file, in hexadecimal. Raises BadInput when it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise _unreadable(path, error) from error
    return digest.hexdigest()


def verify(path: Path, hash: str) -> None:
    """Raise BadInput unless the file has the hash that it had when it was written."""
    if file_hash(path) != hash:
        raise BadInput(
            f"{path} is not what moectl quantize wrote (damaged or replaced): run it again"
        )


def _read_header(path: Path) -> _Header:
    """Parse and check: offsets in order without holes, and the file exactly as long as they
    require."""
    length = int.from_bytes(_read(path, 0, 8).tobytes(), "little")
    nbytes = path.stat().st_size
    if length > min(_HEADER_LIMIT, nbytes):
        raise _foreign(path, "its header is too long")
    try:
        entries = parse_json(_read(path, 8, length).tobytes())
        metadata = _metadata(entries.pop("__metadata__", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise _foreign(path, "its header cannot be read") from error
    _check_format(path, metadata)
    try:
        known_widths = widths(metadata)
        checked = {name: _entry(name, entry, known_widths) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise _foreign(path, "its header does not describe replicas") from error
    ends = [0, *(entry.stop for entry in checked.values())]
    if any(entry.start != before for entry, before in zip(checked.values(), ends, strict=False)):
        raise _foreign(path, "its tensors do not follow each other")
    if nbytes != 8 + length + ends[-1]:
        raise _foreign(path, "its length is not what its header says")
    return _Header(metadata, checked, 8 + length)


def _check_format(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") not in (FORMAT, TRELLIS_FORMAT):
        raise _foreign(
            path,
            (
                f"its format is {metadata.get('format', 'None')[:40]}, not {FORMAT} or "
                f"{TRELLIS_FORMAT}"
            ),
        )


def _metadata(texts: object) -> dict[str, str]:
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise TypeError("metadata are texts by name")
    return texts


def _entry(name: str, entry: dict, known_widths: list[Width]) -> _Entry:
    if name.partition(".")[0] not in {label(bits) for bits in known_widths}:
        raise ValueError(f"{name} is of none of the widths")
    start, stop = entry["data_offsets"]
    dtype = _DTYPES[entry["dtype"]]
    shape = tuple(entry["shape"])
    if not all(type(size) is int and size > 0 for size in (*shape, stop)) or type(start) is not int:
        raise ValueError(f"{shape} is no shape")
    if stop - start != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{stop - start} bytes for {shape}")
    return _Entry(dtype, shape, start, stop)


def _read(path: Path, offset: int, nbytes: int) -> np.ndarray:
    """uint8 [nbytes], a copy; raises BadInput when the file is shorter."""
    target = np.empty(nbytes, np.uint8)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            done = 0
            while done < nbytes and (count := file.readinto(memoryview(target)[done:])):
                done += count
    except OSError as error:
        raise _unreadable(path, error) from error
    if done < nbytes:
        raise _foreign(path, f"it ends after {offset + done} bytes")
    return target


def _digest(metadata: Mapping[str, str], tensors: list[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(_raw(tensor))
    return digest.hexdigest()


def _raw(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def _foreign(path: Path, why: str) -> BadInput:
    return BadInput(f"{path} is damaged or no replica file ({why}): run moectl quantize again")


def _unreadable(path: Path, error: OSError) -> BadInput | OutOfResources:
    return shortage(error) or BadInput(
        f"cannot read {path} ({os.strerror(error.errno) if error.errno else error}): run moectl "
        "quantize again"
    )
