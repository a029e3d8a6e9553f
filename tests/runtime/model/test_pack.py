"""A repacked checkpoint is bit-identical, also for transformers; an expert is one read; it is
written whole or not at all."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from artifacts.common.locks import locked
from artifacts.errors import BadInput, Incompatible, OutOfResources
from runtime.model.files import pack as pack_module
from runtime.model.files.checkpoint import open_checkpoint
from runtime.model.files.pack import Repacked, pack
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from runtime.tiers.ram import RamStore
from tests.conftest import Checkpoint
from tests.helpers.families import FAMILIES, LAYOUTS, VOCABULARY, save
from tests.runtime.session.test_session import plain_model

PROMPT = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(2))
BY_EXPERT = [family for family in FAMILIES if family != "gpt_oss"]


def repacked(folder: Path, out: Path) -> Repacked:
    return pack(open_model(str(folder)), open_checkpoint(folder), out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", BY_EXPERT)
def test_a_repacked_checkpoint_is_the_same_model(
    checkpoint: Checkpoint, family: str, layout: str, tmp_path: Path
) -> None:
    folder = checkpoint(family, layout)
    done = repacked(folder, tmp_path / "packed")
    assert (done.reads_before, done.reads_now) == ({"hub": 1, "fused": 2}[layout], 1)
    first = open_model(str(folder))
    second = open_model(str(done.folder))
    assert second.fingerprint == first.fingerprint and second.tokenizer is not None
    before = RamStore(first.store)
    after = RamStore(second.store)
    for key in range(first.shape.num_keys):
        place = divmod(key, first.shape.num_experts)
        assert torch.equal(before.view(*place), after.view(*place))
    with torch.inference_mode():
        expected = plain_model(folder)(PROMPT).logits
        assert torch.equal(plain_model(done.folder)(PROMPT).logits, expected)
        with Session(second, Settings(budget="30%", link="disk")) as session:
            assert torch.equal(session.forward(PROMPT).logits, expected)


def test_tensors_are_aligned_and_in_the_order_of_a_slot(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    written = open_checkpoint(
        repacked(checkpoint("olmoe", "fused", "bfloat16"), tmp_path / "packed").folder
    )
    tensors = written.tensors
    offsets = [
        tensors[f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"].offset
        for expert in range(8)
        for name in ("gate", "up", "down")
    ]
    assert offsets[0] % 4096 == 0
    assert offsets == [offsets[0] + number * 32 * 24 * 2 for number in range(24)]


def test_stored_dtypes_are_kept(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("olmoe", "fused"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    written = open_checkpoint(repacked(folder, tmp_path / "packed").folder)
    assert {tensor.dtype for tensor in written.tensors.values()} == {torch.float32}


def test_a_changed_config_changes_the_fingerprint(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = repacked(checkpoint("olmoe"), tmp_path / "packed").folder
    config = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (folder / "config.json").write_text(json.dumps(config))
    assert open_model(str(folder)).fingerprint != open_model(str(checkpoint("olmoe"))).fingerprint


def test_experts_stored_by_layer_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(Incompatible, match="experts of gpt_oss a layer at a time"):
        repacked(checkpoint("gpt_oss"), tmp_path / "packed")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_leaves_no_model_and_the_next_run_resumes(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("olmoe")
    out = tmp_path / "packed"
    headers = []
    write = pack_module._header

    def broken(tensors: list, metadata: dict) -> bytes:
        headers.append(tensors[0].name)
        if len(headers) == 2:
            raise KeyboardInterrupt
        return write(tensors, metadata)

    monkeypatch.setattr(pack_module, "_header", broken)
    with pytest.raises(KeyboardInterrupt):
        repacked(folder, out)
    assert not out.exists()
    first = tmp_path / ".packed.packing" / "model-experts-000.safetensors"
    first_written = first.stat().st_mtime_ns
    monkeypatch.setattr(pack_module, "_header", write)
    done = repacked(folder, out)
    assert (done.folder / first.name).stat().st_mtime_ns == first_written
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def test_files_left_by_another_model_are_overwritten(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    other = repacked(save("qwen2_moe", "hub", tmp_path / "other"), tmp_path / "first").folder
    shutil.copytree(other, tmp_path / ".packed.packing")
    done = repacked(checkpoint("olmoe"), tmp_path / "packed")
    assert (
        open_model(str(done.folder)).fingerprint == open_model(str(checkpoint("olmoe"))).fingerprint
    )


def test_no_room_no_folder_or_another_process_is_reported_in_one_line(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("olmoe")
    out = tmp_path / "packed"
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for wrong, message in (
        (tmp_path / "there", "is there already: name a new folder"),
        (tmp_path / "link", "is there already"),
        (tmp_path / "no" / "packed", "there is no folder .*no; make it first"),
        (tmp_path / ("x" * 250), "File name too long; name another"),
    ):
        with pytest.raises(BadInput, match=message) as caught:
            repacked(folder, wrong)
        assert "\n" not in str(caught.value)
    working = tmp_path / ".packed.packing"
    working.mkdir()
    with (
        locked(working / ".lock", busy=""),
        pytest.raises(OutOfResources, match="another process is packing to"),
    ):
        repacked(folder, out)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(pack_module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(
        OutOfResources,
        match="packing takes 0.00 GiB and 0.00 GiB are free in .*name another folder",
    ):
        repacked(folder, out)
    assert not out.exists()
