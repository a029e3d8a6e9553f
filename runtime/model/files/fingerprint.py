"""Tells models apart: by their config, the headers of their files and samples of every tensor's
bytes."""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from runtime.model.files.checkpoint import Checkpoint, StoredTensor
from runtime.model.files.locate import read_config

VOLATILE = {"transformers_version", "_name_or_path"}  # config entries that do not change the model
# Entries in the headers that `moectl pack` writes: the origin's fingerprint, the config, and
# samples of the new files.
REPACKED_FROM = "moectl_packed_from"
REPACKED_CONFIG = "moectl_packed_config"
REPACKED_CONTENT = "moectl_packed_content"
SAMPLE = 512  # bytes read at a place
# bytes: a tensor up to this size is read whole, and places in a tensor are this far apart on
# average
_WHOLE = 4096
_FINGERPRINT = re.compile("[0-9a-f]{64}")  # safe in the names of files
_RULE = b"moectl fingerprint 2"  # tells the fingerprints of this rule from those of another


def config_digest(folder: Path) -> str:
    """Return the sha256 of the canonical config."""
    return _config_digest(read_config(folder)).hexdigest()


def fingerprint(config: dict, checkpoint: Checkpoint) -> str:
    """Return the sha256 of the canonical config, each shard's header and size, and samples of every
    tensor.

    A repacked checkpoint has the fingerprint of its origin, as artefacts of the weights hold for
    both, unless its config or a sample is not as `moectl pack` wrote it.
    """
    content = content_digest(checkpoint.tensors.values())
    digest = _config_digest(config)
    if origin := _origin(
        checkpoint, {REPACKED_CONFIG: digest.hexdigest(), REPACKED_CONTENT: content}
    ):
        return origin
    digest.update(_RULE)
    for shard in checkpoint.shards:  # in the order of their names
        digest.update(shard.header_digest)
        digest.update(shard.nbytes.to_bytes(8, "little"))
    digest.update(bytes.fromhex(content))
    return digest.hexdigest()


def content_digest(tensors: Iterable[StoredTensor]) -> str:
    """Return the sha256 of samples of every tensor, by name: of its first and last bytes and of
    places in between.

    The places follow from name, shape and size: one in each slice of a tensor of three dimensions
    or more, such as the fused experts of a layer, and one in any other tensor. They are independent
    of the order of tensors in the files. Raises BadInput for a file that ends early.
    """
    tensors = sorted(tensors, key=lambda tensor: (tensor.shard.path, tensor.offset))
    samples = [
        (tensor, tensor.offset + offset, nbytes)
        for tensor in tensors
        for offset, nbytes in _places(tensor)
    ]
    for tensor, offset, nbytes in samples:
        tensor.shard.read_ahead(offset, nbytes)
    digests = defaultdict(hashlib.sha256)
    for tensor, offset, nbytes in samples:
        digests[tensor.name].update(tensor.shard.sample(offset, nbytes))
    return hashlib.sha256(
        b"".join(name.encode() + digests[name].digest() for name in sorted(digests))
    ).hexdigest()


def _places(tensor: StoredTensor) -> list[tuple[int, int]]:
    """Return the offsets and the lengths of the samples of a tensor, in bytes from its start."""
    if tensor.nbytes <= _WHOLE:
        return [(0, tensor.nbytes)]
    num_slices = min(tensor.shape[0], tensor.nbytes // _WHOLE) if len(tensor.shape) > 2 else 1
    stride = tensor.nbytes // num_slices
    seed = int.from_bytes(hashlib.sha256(tensor.name.encode()).digest()[:8])
    # An odd multiplier, so that the places of neighbouring slices differ.
    inside = (
        slice_ * stride + (seed * (2 * slice_ + 1) >> 16) % (stride - SAMPLE)
        for slice_ in range(num_slices)
    )
    return [(offset, SAMPLE) for offset in (0, *inside, tensor.nbytes - SAMPLE)]


def _origin(checkpoint: Checkpoint, expected: dict[str, str]) -> str | None:
    """Return the fingerprint that every shard names as its origin's, None unless all have the
    expected entries."""
    entries = {
        tuple(shard.metadata.get(name) for name in (REPACKED_FROM, *expected))
        for shard in checkpoint.shards
    }
    if len(entries) != 1:
        return None
    origin, *found = entries.pop()
    return origin if found == [*expected.values()] and _FINGERPRINT.fullmatch(str(origin)) else None


def _config_digest(config: dict) -> "hashlib._Hash":
    lasting = {name: value for name, value in config.items() if name not in VOLATILE}
    return hashlib.sha256(json.dumps(lasting, sort_keys=True, separators=(",", ":")).encode())
