"""The safetensors shards of a checkpoint: where each tensor lies, and positional reads without
memory-mapping."""

import hashlib
import json
import os
import re
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from types import EllipsisType
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from artifacts.common.untrusted import readable
from artifacts.errors import BadInput
from runtime.model.files.locate import INDEX, is_gguf, read_index, safetensors_files
from runtime.model.files.read_bytes import READ
from runtime.model.huge_pages import HUGE_PAGE, anonymous

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MODEL = "model."
_OUTER = ("module.", "base_model.model.", _MODEL)
"""Prefixes that wrappers put before every name: those of torch and DeepSpeed, PEFT's, and a module
that has the whole model."""
_INNER = re.compile(
    r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_fpw_module"
    r"|_forward_module)\."
)
"""Names of wrapper modules that may stand anywhere in a name."""
_NOWAIT = getattr(os, "RWF_NOWAIT", None)  # only on Linux


class File(Protocol):
    """A file whose bytes are read by position."""

    def read_into(self, offset: int, targets: Sequence[memoryview]) -> None: ...


class RepeatedBytes:
    """A file without end that repeats the same bytes."""

    path = Path()

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read_into(self, offset: int, targets: Sequence[memoryview]) -> None:
        """Fill `targets` one after another with the bytes that follow `offset`."""
        for target in targets:
            first = offset % len(self._content)
            num_repeats = -(-(first + target.nbytes) // len(self._content))
            target[:] = (self._content * num_repeats)[first : first + target.nbytes]
            offset += target.nbytes

    def read_kept(self, offset: int, targets: Sequence[memoryview]) -> bool:
        """Fill `targets` as `read_into` does. Always return True."""
        self.read_into(offset, targets)
        return True


class Contents(NamedTuple):
    """Contents of a file's header: its sha256, the strings stored beside the tensors, and the
    tensors by name."""

    header_digest: bytes
    metadata: dict[str, str]
    tensors: "dict[str, StoredTensor]"


class Shard:
    """One open safetensors file; reads are positional, so threads share it without a lock.

    Raises BadInput if the file is missing, truncated or not safetensors. `header_digest` is the
    sha256 of its header, `metadata` the strings that its writer stored beside the tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._check_whole()
        descriptor = os.open(path, os.O_RDONLY)
        self._closer = weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        if hasattr(os, "posix_fadvise"):  # readahead would fetch an expert's neighbours too
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        self._stamp = _stamp(descriptor)
        self.nbytes, _ = self._stamp
        self.header_digest, self.metadata, self.tensors = self._contents()

    def read_into(self, offset: int, targets: Sequence[memoryview]) -> None:
        """Fill `targets` one after another with the bytes that follow `offset`; BadInput if the
        file ends before."""
        assert self._closer.alive, (
            f"{self.path} is closed: its descriptor may be another file's by now"
        )
        pending = [target for target in targets if target.nbytes]
        while pending:
            count = os.preadv(self._descriptor, pending, offset)
            if count == 0:
                raise BadInput(
                    f"{self.path} ends before byte {offset}: it changed while in use, copy it again"
                )
            READ.add(count)
            offset += count
            pending = _rest(pending, count)

    def read_kept(self, offset: int, targets: Sequence[memoryview]) -> bool:
        """Fill `targets` from the page cache, without waiting for the device.

        Return False, with `targets` undefined, if the cache lacks part of it; the kernel then
        begins to read it.
        """
        assert self._closer.alive, (
            f"{self.path} is closed: its descriptor may be another file's by now"
        )
        if _NOWAIT is None:
            return False
        try:
            # each is a view of bytes, whose length is its size
            return os.preadv(self._descriptor, targets, offset, _NOWAIT) == sum(map(len, targets))
        except (
            OSError
        ):  # not cached, or not supported by this file system; `read_into` reports real errors
            return False

    def sample(self, offset: int, nbytes: int) -> bytes:
        """Read a few bytes; BadInput if the file ends before."""
        assert self._closer.alive, (
            f"{self.path} is closed: its descriptor may be another file's by now"
        )
        found = os.pread(self._descriptor, nbytes, offset)
        if len(found) < nbytes:
            raise BadInput(
                f"{self.path} ends before byte {offset + nbytes}: it changed while in use, copy "
                "it again"
            )
        return found

    def read_ahead(self, offset: int, nbytes: int) -> None:
        """Have the kernel begin to read these bytes, so that many places are read side by side."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def check_unchanged(self) -> None:
        """Raise BadInput if the file was written into since it was opened. Another file that was
        renamed over it does not count, because this shard does not read it."""
        if _stamp(self._descriptor) != self._stamp:
            raise BadInput(
                f"{self.path} changed while it is in use: what was read is of two models, start "
                "again once it is whole"
            )

    def check_in_place(self) -> None:
        """Raise BadInput if the path leads to another file than the one that was opened."""
        try:
            is_same = os.path.samestat(self.path.stat(), os.fstat(self._descriptor))
        except OSError as error:
            raise BadInput(
                f"{self.path} cannot be opened again ({error.strerror}): start again"
            ) from error
        if not is_same:
            raise BadInput(f"{self.path} was replaced since it was opened: start again")

    def close(self) -> None:
        self._closer()

    def _check_whole(self) -> None:
        _check_whole(self.path)

    def _contents(self) -> Contents:
        header = self._header()
        entries = json.loads(header)
        metadata = entries.pop("__metadata__", {})
        tensors = {
            name: _stored_tensor(self, name, entry, 8 + len(header))
            for name, entry in entries.items()
        }
        return Contents(hashlib.sha256(header).digest(), metadata, tensors)

    def _header(self) -> bytes:
        length = bytearray(8)
        self.read_into(0, [memoryview(length)])
        header = bytearray(int.from_bytes(length, "little"))
        self.read_into(8, [memoryview(header)])
        return bytes(header)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as its shard's header describes it; `offset` is in bytes from the start of the
    file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    shard: Shard | RepeatedBytes
    offset: int
    nbytes: int

    def read(self) -> torch.Tensor:
        """Return a copy in memory, in the stored dtype, aligned to 64 bytes, which a mapped file
        would not be. From 2 MiB on it is in huge pages where there are any."""
        raw = (
            anonymous(self.nbytes)
            if self.nbytes >= HUGE_PAGE
            else torch.empty(self.nbytes, dtype=torch.uint8)
        )
        self.shard.read_into(self.offset, [memoryview(raw.numpy())])
        return raw.view(self.dtype).view(self.shape)

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        """Return the values for `tensor[...]`, by which transformers' loader reads a lazy
        tensor."""
        assert index is Ellipsis, f"only [...] is supported, not {index}"
        return self.read()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All shards of one checkpoint, in the order of their names, and every tensor by name."""

    folder: Path
    shards: tuple[Shard, ...]
    tensors: dict[str, StoredTensor]

    def check_unchanged(self) -> None:
        """Raise BadInput that names a file which was written into since it was opened."""
        for shard in self.shards:
            shard.check_unchanged()

    def close(self) -> None:
        for shard in self.shards:
            shard.close()


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open every shard of `folder` and read only the headers; BadInput names the file that cannot
    be used."""
    if is_gguf(folder):
        raise BadInput(
            f"{folder} is a GGUF file: moectl repacks and exports safetensors only, use it as it is"
        )
    shards = tuple(Shard(path) for path in safetensors_files(folder))
    return Checkpoint(folder, shards, _unwrapped(_by_name(folder, shards)))


def read_tensor(file: File, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Read `nbytes` bytes of `file` as a flat tensor of `dtype`."""
    raw = torch.empty(nbytes, dtype=torch.uint8)
    file.read_into(offset, [memoryview(raw.numpy())])
    return raw.view(dtype)


def _stamp(descriptor: int) -> tuple[int, int]:
    """Return numbers that change when an open file is written into."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _by_name(folder: Path, shards: Sequence[Shard]) -> dict[str, StoredTensor]:
    """Return every tensor by name. Where several files hold a name, take it from the file that the
    index names.

    Raises BadInput for a tensor that is in several files and in none that the index names for it.
    """
    tensors: dict[str, StoredTensor] = {}
    several: dict[str, list[StoredTensor]] = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            if (first := tensors.setdefault(name, tensor)) is not tensor:
                several.setdefault(name, [first]).append(tensor)
    files = read_index(folder / INDEX) if several else {}
    for name, found in several.items():
        named = next(
            (tensor for tensor in found if tensor.shard.path.name == files.get(name)), None
        )
        if named is None:
            holders = " and ".join(tensor.shard.path.name for tensor in found)
            raise BadInput(
                f"{holders} in {folder} hold {name[:80]}, and {INDEX} does not say which of them "
                "is right: download the model again"
            )
        tensors[name] = named
    return tensors


def _unwrapped(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors under the names that the model gives them, without the prefixes of modules
    that training wrapped around the model or its parts. All names stay as stored where two tensors
    would get the same one."""
    names = {name: _INNER.sub("", name) for name in tensors}
    while prefix := next((prefix for prefix in _OUTER if _have(names.values(), prefix)), None):
        names = {name: own.removeprefix(prefix) for name, own in names.items()}
    if len(set(names.values())) < len(names):
        return tensors
    return {
        own: tensors[name] if own == name else replace(tensors[name], name=own)
        for name, own in names.items()
    }


def _have(names: Collection[str], prefix: str) -> bool:
    """Return whether all names begin with `prefix`, a prefix that no model has by itself. For
    `model.` some name must also have it twice or before `lm_head.`."""
    if not names or not all(name.startswith(prefix) for name in names):
        return False
    return prefix != _MODEL or any(
        name.startswith((2 * _MODEL, f"{_MODEL}lm_head.")) for name in names
    )


def _check_whole(path: Path) -> None:
    """Let safetensors validate the header, by the rules of its format: no hole, no overlap, every
    byte covered."""
    if not readable(path):
        raise BadInput(
            f"{path} is missing: the checkpoint's index names it, so download the model again"
        )
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        reason = shorten(str(error), 160)
        raise BadInput(
            f"{path} is truncated or no safetensors file ({reason}): download it again"
        ) from error


def _stored_tensor(shard: Shard, name: str, entry: dict, data_start: int) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        raise BadInput(f"{shard.path}: {name} has dtype {entry['dtype']}, which moectl cannot read")
    start, stop = entry["data_offsets"]
    return StoredTensor(
        name, DTYPES[entry["dtype"]], tuple(entry["shape"]), shard, data_start + start, stop - start
    )


def _rest(targets: list[memoryview], count: int) -> list[memoryview]:
    """Return what remains of `targets` after `count` bytes."""
    for index, target in enumerate(targets):
        if count < target.nbytes:
            return [target[count:], *targets[index + 1 :]]
        count -= target.nbytes
    return []
