"""A fingerprint tells models apart by their weights, whichever tensor or expert differs."""

import json
import shutil
from pathlib import Path

import pytest

from runtime.model.files.checkpoint import Shard, open_checkpoint
from runtime.model.files.fingerprint import SAMPLE, content_digest, fingerprint
from runtime.model.files.locate import read_config
from runtime.model.files.pack import pack
from runtime.model.open import open_model
from tests.conftest import Checkpoint
from tests.helpers.rewritten import rewritten


def found(folder: Path) -> str:
    checkpoint = open_checkpoint(folder)
    try:
        return fingerprint(read_config(folder), checkpoint)
    finally:
        checkpoint.close()


@pytest.mark.parametrize("layout", ["hub", "fused"])
def test_each_tensor_counts(checkpoint: Checkpoint, tmp_path: Path, layout: str) -> None:
    folder = shutil.copytree(checkpoint("olmoe", layout), tmp_path / "model")
    original = found(folder)
    seen = set()
    for name in open_checkpoint(folder).tensors:
        with rewritten(folder, name):
            seen.add(found(folder))
    assert original not in seen and len(seen) == len(open_checkpoint(folder).tensors)
    assert found(folder) == original


@pytest.mark.parametrize("expert", range(8))
def test_each_expert_of_a_fused_tensor_counts(
    checkpoint: Checkpoint, tmp_path: Path, expert: int
) -> None:
    folder = shutil.copytree(checkpoint("olmoe", "fused"), tmp_path / "model")
    original = found(folder)
    with rewritten(folder, "model.layers.1.mlp.experts.gate_up_proj", part=(expert, 8)):
        assert found(folder) != original


def test_a_packed_checkpoint_with_other_weights_is_not_its_origin(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint("olmoe", "fused")
    packed = pack(open_model(str(folder)), open_checkpoint(folder), tmp_path / "packed").folder
    assert found(packed) == found(folder)
    with rewritten(packed, "model.layers.1.mlp.experts.5.up_proj.weight"):
        assert found(packed) != found(folder)
    again = pack(open_model(str(packed)), open_checkpoint(packed), tmp_path / "again").folder
    assert found(again) == found(folder)


def test_a_large_tensor_is_sampled_at_a_few_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of a GiB, all of it holes; one of its tensors has 256 slices."""
    nbytes = 8 << 20
    entries = {}
    for number in range(128):
        shape = [2048, 2048] if number else [256, 128, 128]
        offsets = [number * nbytes, (number + 1) * nbytes]
        entries[f"layer.{number}"] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
    header = json.dumps(entries).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 128 * nbytes)
    reads = []
    sample = Shard.sample
    monkeypatch.setattr(
        Shard, "sample", lambda shard, *place: reads.append(place) or sample(shard, *place)
    )
    checkpoint = open_checkpoint(tmp_path)
    content_digest(checkpoint.tensors.values())
    assert len(reads) == 127 * 3 + 256 + 2 and {nbytes for _, nbytes in reads} == {SAMPLE}
    assert reads == sorted(reads), "in the order of the file"
    starts = {tensor.offset for tensor in checkpoint.tensors.values()}
    ends = {tensor.offset + nbytes - SAMPLE for tensor in checkpoint.tensors.values()}
    assert starts | ends <= {offset for offset, _ in reads}
