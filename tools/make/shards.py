"""Writes safetensors shards of any size piece by piece: no tensor is ever whole in memory."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

_ITEM_NBYTES = {
    "BF16": 2,
    "F8_E4M3": 1,
    "U8": 1,
}  # in the order that safetensors gives to the tensors of a file

Content = Callable[["Entry"], Iterator[memoryview]]
"""The bytes of a tensor, in pieces."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a shard: its name, its dtype as safetensors calls it, its shape and what fills
    it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _ITEM_NBYTES[self.dtype]


def write_shards(
    folder: Path, entries: Iterable[Entry], content: Content, *, shard_nbytes: int
) -> int:
    """Write the tensors in their order into shards of at most `shard_nbytes` bytes, unless a tensor
    is larger, and the index beside them. Return the bytes of all files."""
    shards = _divided(entries, shard_nbytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / name, shard, content)
        weight_map |= {entry.name: name for entry in shard}
    total = sum(entry.nbytes for shard in shards for entry in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return sum(path.stat().st_size for path in folder.iterdir())


def _divided(entries: Iterable[Entry], shard_nbytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not shards or entry.nbytes > room:
            shards.append([])
            room = shard_nbytes
        shards[-1].append(entry)
        room -= entry.nbytes
    return shards


def _write_shard(path: Path, entries: Sequence[Entry], content: Content) -> None:
    """Write one file with its tensors in the order of safetensors' own writer: by dtype, then by
    name. What is written leaves the page cache, which is smaller than a checkpoint."""
    dtypes = list(_ITEM_NBYTES)
    entries = sorted(entries, key=lambda entry: (dtypes.index(entry.dtype), entry.name))
    with path.open("wb") as file:
        file.write(_header(entries))
        for entry in entries:
            for piece in content(entry):
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _header(entries: Sequence[Entry]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        place = [offset, offset := offset + entry.nbytes]
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": place,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
