"""Repacked checkpoints: the same model to the bit, for transformers too; each expert one read; whole or not at all."""

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from artifacts.errors import BadInput, Incompatible, OutOfResources
from runtime.model import pack as repack
from runtime.model.checkpoint import open_checkpoint
from runtime.model.open import open_model
from runtime.model.pack import Repacked, pack
from runtime.session.session import Session, Settings
from runtime.tiers.ram import RamStore
from tests.conftest import Checkpoint
from tests.helpers.families import FAMILIES, LAYOUTS, VOCABULARY, save
from tests.runtime.session.test_session import plain_model

PROMPT = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(2))
BY_EXPERT = [family for family in FAMILIES if family != "gpt_oss"]


def packed(folder: Path, out: Path) -> Repacked:
    return pack(open_model(str(folder)), open_checkpoint(folder), out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", BY_EXPERT)
def test_a_packed_checkpoint_is_the_same_model(
    checkpoint: Checkpoint, family: str, layout: str, tmp_path: Path
) -> None:
    folder = checkpoint(family, layout)
    done = packed(folder, tmp_path / "packed")
    assert (done.reads_before, done.reads_now) == ({"hub": 1, "fused": 2}[layout], 1)
    first, second = open_model(str(folder)), open_model(str(done.folder))
    assert second.fingerprint == first.fingerprint and second.tokenizer is not None
    before, after = RamStore(first.store), RamStore(second.store)
    for key in range(first.shape.num_keys):
        place = divmod(key, first.shape.num_experts)
        assert torch.equal(before.view(*place), after.view(*place))
    with torch.inference_mode():
        expected = plain_model(folder)(PROMPT).logits
        assert torch.equal(plain_model(done.folder)(PROMPT).logits, expected)
        with Session(second, Settings(budget="30%", link="disk")) as session:
            assert torch.equal(session.forward(PROMPT).logits, expected)


def test_tensors_begin_on_a_border_in_the_order_of_a_slot(checkpoint: Checkpoint, tmp_path: Path) -> None:
    made = open_checkpoint(packed(checkpoint("olmoe", "fused", "bfloat16"), tmp_path / "packed").folder)
    tensors = made.tensors
    offsets = [
        tensors[f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"].offset
        for expert in range(8)
        for name in ("gate", "up", "down")
    ]
    assert offsets[0] % 4096 == 0
    assert offsets == [offsets[0] + number * 32 * 24 * 2 for number in range(24)]


def test_stored_dtypes_stay(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("olmoe", "fused"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    made = open_checkpoint(packed(folder, tmp_path / "packed").folder)
    assert {tensor.dtype for tensor in made.tensors.values()} == {torch.float32}


def test_a_config_that_is_changed_makes_another_model_of_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = packed(checkpoint("olmoe"), tmp_path / "packed").folder
    config = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (folder / "config.json").write_text(json.dumps(config))
    assert open_model(str(folder)).fingerprint != open_model(str(checkpoint("olmoe"))).fingerprint


def test_experts_that_are_stored_by_the_layer_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(Incompatible, match="experts of gpt_oss a layer at a time"):
        packed(checkpoint("gpt_oss"), tmp_path / "packed")
    assert not list(tmp_path.iterdir())


def test_a_broken_run_leaves_no_model_and_the_next_goes_on(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out, written = checkpoint("olmoe"), tmp_path / "packed", []
    write = repack._header

    def broken(tensors: list, metadata: dict) -> bytes:
        written.append(tensors[0].name)
        if len(written) == 2:
            raise KeyboardInterrupt
        return write(tensors, metadata)

    monkeypatch.setattr(repack, "_header", broken)
    with pytest.raises(KeyboardInterrupt):
        packed(folder, out)
    assert not out.exists()
    first = tmp_path / ".packed.packing" / "model-experts-000.safetensors"
    made = first.stat().st_mtime_ns
    monkeypatch.setattr(repack, "_header", write)
    done = packed(folder, out)
    assert (done.folder / first.name).stat().st_mtime_ns == made
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def test_what_another_model_left_is_written_anew(checkpoint: Checkpoint, tmp_path: Path) -> None:
    other = packed(save("qwen2_moe", "hub", tmp_path / "other"), tmp_path / "first").folder
    shutil.copytree(other, tmp_path / ".packed.packing")
    done = packed(checkpoint("olmoe"), tmp_path / "packed")
    assert open_model(str(done.folder)).fingerprint == open_model(str(checkpoint("olmoe"))).fingerprint


def test_no_room_no_folder_or_another_packer_is_told_in_one_line(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = checkpoint("olmoe"), tmp_path / "packed"
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for wrong, message in (
        (tmp_path / "there", "is there already: name a new folder"),
        (tmp_path / "link", "is there already"),
        (tmp_path / "no" / "packed", "there is no folder .*no; make it first"),
        (tmp_path / ("x" * 250), "File name too long; name another"),
    ):
        with pytest.raises(BadInput, match=message) as caught:
            packed(folder, wrong)
        assert "\n" not in str(caught.value)
    working = tmp_path / ".packed.packing"
    working.mkdir()
    descriptor = os.open(working, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(OutOfResources, match="another process is packing to"):
        packed(folder, out)
    os.close(descriptor)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(repack.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OutOfResources, match="packing takes 0.00 GiB and 0.00 GiB are free in .*name another folder"):
        packed(folder, out)
    assert not out.exists()
