"""Rewrites a checkpoint so that the bytes of each expert follow one another, and each is one read.

What comes out is an ordinary safetensors checkpoint of the published layout (a tensor per expert and projection): plain
transformers opens it too. Only the order of tensors is new, and headers that end on a border of 4096 bytes.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from transformers.core_model_loading import revert_weight_conversion

from artifacts.common.files import check_writable, replacing
from artifacts.errors import BadInput, Incompatible, OutOfResources
from runtime.model.checkpoint import DTYPES, INDEX, Checkpoint, StoredTensor, open_checkpoint
from runtime.model.expert_store import Piece, num_reads
from runtime.model.expert_tensors import Located, locate_experts
from runtime.model.locate import WANTED
from runtime.model.open import PACKED_CONFIG, PACKED_FROM, MoeModel, config_digest
from runtime.model.skeleton import build_skeleton

_BORDER = 4096  # bytes: where a read past the page cache must begin
_CHUNK = 4 << 20  # bytes copied at a time
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Repacked:
    """A folder written: its bytes, and in how many reads an expert comes, at most, from the old files and the new."""

    folder: Path
    nbytes: int
    reads_before: int
    reads_now: int


def pack(
    opened: MoeModel, checkpoint: Checkpoint, out: Path, *, progress: Progress = lambda done, total: None
) -> Repacked:
    """Write `out`, a new folder, whole or not at all; what a broken run has finished is not written again.

    Raises BadInput when the folder is there already or cannot be, Incompatible for a family whose experts transformers
    stores by the layer only, OutOfResources when the disk has no room or another process packs to the same place.
    """
    located = _located(opened, checkpoint)
    shards = _shards(opened, located)
    with _folder(out, sum(tensor.nbytes for own in shards.values() for tensor in own)) as folder:
        metadata = {"format": "pt", PACKED_FROM: opened.fingerprint, PACKED_CONFIG: config_digest(checkpoint.folder)}
        for done, (name, tensors) in enumerate(shards.items()):
            _write(folder / name, tensors, metadata)
            progress(done + 1, len(shards))
        _write_texts(checkpoint.folder, folder, {one.name: name for name, own in shards.items() for one in own})
        nbytes, reads_now = _checked(opened, folder)
    return Repacked(out, nbytes, _most_reads(opened, located), reads_now)


def _located(opened: MoeModel, checkpoint: Checkpoint) -> Located:
    layout, shape = opened.store.layout, opened.shape
    return locate_experts(opened.model, opened.layers, shape=shape, layout=layout, tensors=checkpoint.tensors)


def _shards(opened: MoeModel, located: Located) -> dict[str, list[StoredTensor]]:
    """By file name: tensors as they shall be called, in their order, and where their bytes lie now."""
    places, num_experts = _published(opened), opened.shape.num_experts
    shards = {}
    for layer in range(opened.shape.num_layers):
        keys = range(layer * num_experts, (layer + 1) * num_experts)
        tensors = [_stored(target, located.pieces[key]) for key in keys for target in places[key]]
        shards[f"model-experts-{layer:03}.safetensors"] = tensors
    return shards | {"model-others.safetensors": list(located.others.values())}


def _published(opened: MoeModel) -> list[list[tuple[StoredTensor, Piece]]]:
    """By key, in the order of a slot: the tensors of the published layout, and what each fills of the slot.

    `offset` of these tensors is their number, by which the search for an expert's bytes gives them back.
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
            f"transformers stores the experts of {opened.family} a layer at a time, and knows no layout by expert: "
            "there is nothing to pack"
        )
    tensors = [
        StoredTensor(name, one.dtype, tuple(one.shape), None, number, one.nbytes)
        for number, (name, one) in enumerate(single.items())
    ]
    by_name = {tensor.name: tensor for tensor in tensors}
    found = locate_experts(opened.model, opened.layers, shape=opened.shape, layout=opened.store.layout, tensors=by_name)
    ordered = (sorted(pieces, key=lambda piece: piece.start) for pieces in found.pieces)
    return [[(tensors[piece.offset], piece) for piece in pieces] for pieces in ordered]


def _stored(target: tuple[StoredTensor, Piece], pieces: Sequence[Piece]) -> StoredTensor:
    """A tensor of the published layout where its bytes lie now, in the dtype that they have there."""
    tensor, place = target
    parts = [part for piece in pieces if (part := piece.within(place.start, place.stop))]
    assert len(parts) == 1, f"{tensor.name} is spread over {len(parts)} stored tensors"
    return replace(tensor, dtype=parts[0].dtype, shard=parts[0].shard, offset=parts[0].offset, nbytes=parts[0].nbytes)


def _write(path: Path, tensors: Sequence[StoredTensor], metadata: dict[str, str]) -> None:
    """One safetensors file with the tensors in this order; nothing if it is there already."""
    header, nbytes = _header(tensors, metadata), sum(tensor.nbytes for tensor in tensors)
    if path.is_file() and path.stat().st_size == len(header) + nbytes and _begins_with(path, header):
        return
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(header)
        for tensor in tensors:
            for start in range(0, tensor.nbytes, _CHUNK):
                chunk = bytearray(min(_CHUNK, tensor.nbytes - start))
                tensor.shard.read_into(tensor.offset + start, [memoryview(chunk)])
                file.write(chunk)


def _header(tensors: Sequence[StoredTensor], metadata: dict[str, str]) -> bytes:
    """As the format has it, filled up with blanks to a border, so that the first tensor begins there."""
    entries: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for tensor in tensors:
        where = [offset, offset + tensor.nbytes]
        entries[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": where}
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _BORDER)
    return len(text).to_bytes(8, "little") + text


def _begins_with(path: Path, header: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(header)) == header


def _write_texts(source: Path, folder: Path, weight_map: dict[str, str]) -> None:
    """The index, and whatever else lies beside the checkpoint's weights."""
    for path in (path for pattern in WANTED for path in source.glob(pattern)):
        if path.suffix != ".safetensors" and path.name != INDEX:
            shutil.copyfile(path, folder / path.name)
    with replacing(folder / INDEX) as temporary:
        temporary.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1) + "\n")


def _checked(opened: MoeModel, folder: Path) -> tuple[int, int]:
    """Bytes of the new files, and reads of an expert from them; every expert is found, or this raises BadInput."""
    made = open_checkpoint(folder)
    try:
        return sum(shard.nbytes for shard in made.shards), _most_reads(opened, _located(opened, made))
    finally:
        made.close()


def _most_reads(opened: MoeModel, located: Located) -> int:
    return max(num_reads(pieces, opened.store.layout.dtype) for pieces in located.pieces)


@contextmanager
def _folder(out: Path, nbytes: int) -> Iterator[Path]:
    """Lend a folder beside `out` that takes its name when all went well, and else stays, for the next try."""
    if os.path.lexists(out):
        raise BadInput(f"{out} is there already: name a new folder")
    check_writable(out)
    folder = out.with_name(f".{out.name}.packing")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot make {folder}: {error.strerror}; name another folder") from error
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, out)
        _check_room(folder, nbytes)
        yield folder
        os.fsync(descriptor)
        folder.rename(out)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, out: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise OutOfResources(f"another process is packing to {out}: wait for it, or name another folder") from error


def _check_room(folder: Path, nbytes: int) -> None:
    written = sum(path.stat().st_size for path in folder.iterdir())
    free = shutil.disk_usage(folder).free
    if nbytes > written + free:
        raise OutOfResources(
            f"packing takes {nbytes / 2**30:.2f} GiB and {(written + free) / 2**30:.2f} GiB are free in "
            f"{folder.parent.resolve()}: free some, or name another folder"
        )
