"""Repacks a checkpoint so that the bytes of each expert are contiguous, and an expert is one read.

The result is an ordinary safetensors checkpoint of the published layout (one tensor per expert and
projection), which plain transformers opens too. Only the order of tensors differs, and headers are
padded to a multiple of 4096 bytes.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from transformers.core_model_loading import revert_weight_conversion

from artifacts.common.files import check_writable, replacing, sync
from artifacts.common.locks import locked
from artifacts.errors import BadInput, Incompatible, OutOfResources
from runtime.model.files.checkpoint import DTYPES, Checkpoint, StoredTensor, open_checkpoint
from runtime.model.files.expert_store import Extent, num_reads
from runtime.model.files.expert_tensors import LocatedExperts, locate_experts
from runtime.model.files.fingerprint import (
    REPACKED_CONFIG,
    REPACKED_CONTENT,
    REPACKED_FROM,
    config_digest,
    content_digest,
    fingerprint,
)
from runtime.model.files.locate import INDEX, other_files, read_config
from runtime.model.open import MoeModel
from runtime.model.skeleton import build_skeleton

_ALIGNMENT = 4096  # bytes: of the start of a read that bypasses the page cache
_CHUNK = 4 << 20  # bytes copied at a time
_LOCK = ".lock"  # in the folder that is being written
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Repacked:
    """A folder that was written: its bytes, and the most reads that an expert takes from the old
    and from the new files."""

    folder: Path
    nbytes: int
    reads_before: int
    reads_now: int


def pack(
    opened: MoeModel,
    checkpoint: Checkpoint,
    out: Path,
    *,
    progress: Progress = lambda done, total: None,
) -> Repacked:
    """Write `out`, a new folder, completely or not at all; files that an interrupted run completed
    are kept.

    Raises BadInput if the folder exists or cannot be made, and if `checkpoint` is not `opened` or
    changes meanwhile; Incompatible for a family whose experts transformers stores only by layer;
    OutOfResources if the disk has no room or another process packs to the same folder.
    """
    if fingerprint(read_config(checkpoint.folder), checkpoint) != opened.fingerprint:
        raise BadInput(f"{checkpoint.folder} was replaced since it was opened: start again")
    if not opened.store.layout.is_plain:
        raise Incompatible(
            "the checkpoint has its experts in few bits, which moectl does not repack: use it as "
            "it is"
        )
    located = _located(opened, checkpoint)
    shards = _shards(opened, located)
    with _folder(
        out, sum(tensor.nbytes for tensors in shards.values() for tensor in tensors)
    ) as folder:
        metadata = {
            "format": "pt",
            REPACKED_FROM: opened.fingerprint,
            REPACKED_CONFIG: config_digest(checkpoint.folder),
            REPACKED_CONTENT: content_digest(
                tensor for tensors in shards.values() for tensor in tensors
            ),
        }
        for done, (name, tensors) in enumerate(shards.items()):
            _write(folder / name, tensors, metadata, check=checkpoint.check_unchanged)
            progress(done + 1, len(shards))
        weight_map = {tensor.name: name for name, tensors in shards.items() for tensor in tensors}
        _write_texts(checkpoint.folder, folder, weight_map)
        nbytes, reads_now = _checked(opened, folder)
    return Repacked(out, nbytes, _most_reads(opened, located), reads_now)


def _located(opened: MoeModel, checkpoint: Checkpoint) -> LocatedExperts:
    layout = opened.store.layout
    shape = opened.shape
    return locate_experts(
        opened.model, opened.layers, shape=shape, layout=layout, tensors=checkpoint.tensors
    )


def _shards(opened: MoeModel, located: LocatedExperts) -> dict[str, list[StoredTensor]]:
    """Return by file name the tensors to write, in order, under their new names and at their
    present places."""
    places = _published(opened)
    num_experts = opened.shape.num_experts
    shards = {}
    for layer in range(opened.shape.num_layers):
        keys = range(layer * num_experts, (layer + 1) * num_experts)
        tensors = [_stored(target, located.extents[key]) for key in keys for target in places[key]]
        shards[f"model-experts-{layer:03}.safetensors"] = tensors
    return shards | {"model-others.safetensors": list(located.others.values())}


def _published(opened: MoeModel) -> list[list[tuple[StoredTensor, Extent]]]:
    """Return by key, in the order of a slot, the tensors of the published layout and the extents
    that they fill.

    `offset` of these tensors is their index, by which they are found again in the extents.
    """
    skeleton = build_skeleton(opened.config, opened.store.layout.dtype)
    whole = {
        f"{layer.name}.{name}": skeleton.get_parameter(f"{layer.name}.{name}")
        for layer in opened.layers
        for name in layer.shapes
    }
    single = revert_weight_conversion(skeleton, dict(whole))
    if set(single) & set(whole):
        raise Incompatible(
            f"transformers stores the experts of {opened.family} a layer at a time, and knows no "
            "layout by expert: there is nothing to pack"
        )
    tensors = [
        StoredTensor(name, parameter.dtype, tuple(parameter.shape), None, index, parameter.nbytes)
        for index, (name, parameter) in enumerate(single.items())
    ]
    by_name = {tensor.name: tensor for tensor in tensors}
    layout = opened.store.layout
    located = locate_experts(
        opened.model, opened.layers, shape=opened.shape, layout=layout, tensors=by_name
    )
    ordered = (sorted(extents, key=lambda extent: extent.start) for extents in located.extents)
    return [[(tensors[extent.offset], extent) for extent in extents] for extents in ordered]


def _stored(target: tuple[StoredTensor, Extent], extents: Sequence[Extent]) -> StoredTensor:
    """Return a tensor of the published layout at the present place of its bytes, in their present
    dtype."""
    tensor, place = target
    parts = [part for extent in extents if (part := extent.within(place.start, place.stop))]
    assert len(parts) == 1, f"{tensor.name} is spread over {len(parts)} stored tensors"
    return replace(
        tensor,
        dtype=parts[0].dtype,
        shard=parts[0].shard,
        offset=parts[0].offset,
        nbytes=parts[0].nbytes,
    )


def _write(
    path: Path,
    tensors: Sequence[StoredTensor],
    metadata: dict[str, str],
    *,
    check: Callable[[], None],
) -> None:
    """Write one safetensors file with the tensors in this order, unless it is complete already.
    `check` raises if what was read must not be kept."""
    header = _header(tensors, metadata)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if (
        path.is_file()
        and path.stat().st_size == len(header) + nbytes
        and _begins_with(path, header)
    ):
        return
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(header)
        for tensor in tensors:
            for start in range(0, tensor.nbytes, _CHUNK):
                chunk = bytearray(min(_CHUNK, tensor.nbytes - start))
                tensor.shard.read_into(tensor.offset + start, [memoryview(chunk)])
                file.write(chunk)
        check()


def _header(tensors: Sequence[StoredTensor], metadata: dict[str, str]) -> bytes:
    """Return the header, padded with blanks so that the first tensor is aligned."""
    entries: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for tensor in tensors:
        offsets = [offset, offset + tensor.nbytes]
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _begins_with(path: Path, header: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(header)) == header


def _write_texts(source: Path, folder: Path, weight_map: dict[str, str]) -> None:
    """Copy the other files of the checkpoint and write the index."""
    for path in other_files(source):
        shutil.copyfile(path, folder / path.name)
    with replacing(folder / INDEX) as temporary:
        temporary.write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1) + "\n"
        )


def _checked(opened: MoeModel, folder: Path) -> tuple[int, int]:
    """Return the bytes of the new files and the most reads of an expert from them; BadInput if an
    expert is missing."""
    repacked = open_checkpoint(folder)
    try:
        return sum(shard.nbytes for shard in repacked.shards), _most_reads(
            opened, _located(opened, repacked)
        )
    finally:
        repacked.close()


def _most_reads(opened: MoeModel, located: LocatedExperts) -> int:
    return max(num_reads(extents) for extents in located.extents)


@contextmanager
def _folder(out: Path, nbytes: int) -> Iterator[Path]:
    """Lend a folder beside `out` that is renamed to `out` on success, and kept for the next run on
    failure."""
    if os.path.lexists(out):
        raise BadInput(f"{out} is there already: name a new folder")
    check_writable(out)
    folder = out.with_name(f".{out.name}.packing")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot make {folder}: {error.strerror}; name another folder") from error
    with locked(
        folder / _LOCK,
        busy=f"another process is packing to {out}: wait for it, or name another folder",
    ):
        _check_room(folder, nbytes)
        yield folder
        sync(folder)
        folder.rename(out)
        (out / _LOCK).unlink()


def _check_room(folder: Path, nbytes: int) -> None:
    written = sum(path.stat().st_size for path in folder.iterdir())
    free = shutil.disk_usage(folder).free
    if nbytes > written + free:
        raise OutOfResources(
            f"packing takes {nbytes / 2**30:.2f} GiB and {(written + free) / 2**30:.2f} GiB are "
            f"free in {folder.parent.resolve()}: free some, or name another folder"
        )
