"""Slots and stores: alignment, views, reads from disk and RAM, and files that change while a store is open."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from artifacts.errors import BadInput, OutOfResources
from runtime.model import direct_io
from runtime.model.expert_store import DiskStore
from runtime.model.layout import ExpertLayout, aligned
from runtime.model.open import open_model
from runtime.tiers.neuron_major import NeuronLayout
from runtime.tiers.ram import RamStore
from tests.conftest import Checkpoint
from tests.helpers.families import LAYOUTS, save


def test_parts_are_aligned_to_64_bytes() -> None:
    layout = ExpertLayout.of({"gate_up_proj": (3, 5), "gate_up_proj_bias": (3,), "down_proj": (5, 3)}, torch.bfloat16)
    assert [(part.offset, part.nbytes) for part in layout.parts] == [(0, 30), (64, 6), (128, 30)]
    assert layout.nbytes == 192


def test_views_share_the_buffer() -> None:
    layout = ExpertLayout.of({"up_proj": (3, 5), "down_proj": (5, 3)}, torch.float32)
    buffer = aligned(layout.nbytes + 64).zero_()
    views = layout.views(buffer)
    views["down_proj"][4, 2] = 1.0
    assert {name: tuple(view.shape) for name, view in views.items()} == {"up_proj": (3, 5), "down_proj": (5, 3)}
    assert buffer[64:124].view(torch.float32)[-1] == 1.0
    assert all(view.data_ptr() % 64 == 0 for view in views.values())


def test_aligned_without_room() -> None:
    with pytest.raises(OutOfResources, match="no room for"):
        aligned(2**60)


def test_a_slot_may_be_longer_than_an_expert(store: DiskStore) -> None:
    exact, longer = aligned(store.layout.nbytes), aligned(store.layout.nbytes + 640).fill_(7)
    store.read(1, 2, exact)
    store.read(1, 2, longer)
    assert torch.equal(exact, longer[: store.layout.nbytes])
    assert (longer[store.layout.nbytes :] == 7).all()


def test_ram_holds_the_bytes_on_disk(store: DiskStore) -> None:
    counts: list[int] = []
    ram = RamStore(store, progress=counts.append)
    assert counts == list(range(1, store.shape.num_keys + 1))
    assert (ram.layout, ram.shape) == (store.layout, store.shape)
    expected, got = aligned(store.layout.nbytes), aligned(store.layout.nbytes)
    for layer in range(store.shape.num_layers):
        for expert in range(store.shape.num_experts):
            store.read(layer, expert, expected)
            ram.read(layer, expert, got)
            assert torch.equal(got, expected)
            assert torch.equal(ram.view(layer, expert), expected)
            assert ram.view(layer, expert).data_ptr() % 64 == 0


def test_a_view_copies_nothing(store: DiskStore) -> None:
    ram = RamStore(store)
    assert ram.view(1, 3).data_ptr() == ram.view(1, 3).data_ptr()
    assert ram.view(1, 3).data_ptr() - ram.view(0, 0).data_ptr() == (8 + 3) * store.layout.nbytes


def test_threads_share_a_store(store: DiskStore) -> None:
    ram = RamStore(store)

    def reads_right(key: int) -> bool:
        buffer = aligned(store.layout.nbytes)
        layer, expert = divmod(key % store.shape.num_keys, store.shape.num_experts)
        store.read(layer, expert, buffer)
        return torch.equal(buffer, ram.view(layer, expert))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(reads_right, range(400)))


def test_file_truncated_after_opening(tmp_path: Path) -> None:
    folder = save("olmoe", "hub", tmp_path)
    store = open_model(str(folder)).store
    os.truncate(folder / "model.safetensors", 30_000)
    with pytest.raises(BadInput, match=r"model\.safetensors ends before byte \d+: it changed while in use"):
        RamStore(store)


def test_file_replaced_after_opening(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("olmoe"), tmp_path / "model")
    store = open_model(str(folder)).store
    expected = RamStore(store)
    (tmp_path / "new").write_bytes(b"another file under the same name")
    (tmp_path / "new").replace(folder / "model.safetensors")
    got = aligned(store.layout.nbytes)
    store.read(0, 5, got)
    assert torch.equal(got, expected.view(0, 5))


def test_closing_frees_every_file(checkpoint: Checkpoint) -> None:
    before = _open_files()
    store = open_model(str(checkpoint("olmoe", "fused"))).store
    assert _open_files() != before
    store.close()
    store.close()
    assert _open_files() <= before


def _open_files() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


@pytest.fixture(params=["hub", "fused"])
def store(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> DiskStore:
    return open_model(str(checkpoint("olmoe", request.param))).store


@pytest.mark.parametrize("layout", LAYOUTS)
def test_direct_reads_give_the_same_bytes(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "_CHUNK", 4096)  # less than an expert
    folder = save("olmoe", layout, tmp_path)
    store = open_model(str(folder)).store
    direct, got = direct_or_skip(store), aligned(store.layout.nbytes)
    expected = RamStore(store)
    for key in range(store.shape.num_keys):
        place = divmod(key, store.shape.num_experts)
        direct.read(*place, got.zero_())
        assert torch.equal(got, expected.view(*place))
    os.truncate(folder / "model.safetensors", 30_000)
    with pytest.raises(BadInput, match=r"model\.safetensors ends before byte \d+: it changed while in use"):
        RamStore(direct)


def test_direct_reads_convert_dtypes_too(checkpoint: Checkpoint) -> None:
    store = open_model(str(checkpoint("olmoe")), dtype=torch.bfloat16).store
    expected, got = aligned(store.layout.nbytes), aligned(store.layout.nbytes)
    store.read(1, 3, expected)
    direct_or_skip(store).read(1, 3, got)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spans_of_an_expert_equal_those_of_the_whole(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """The checkpoint is float32; it is read unchanged, or converted."""
    store = open_model(str(checkpoint("olmoe")), dtype=dtype).store
    whole, part = aligned(store.layout.nbytes), aligned(store.layout.nbytes).fill_(7)
    store.read(1, 3, whole)
    spans = ((64, 640), (1280, store.layout.nbytes - 64))
    store.read(1, 3, part, spans=spans)
    outside = torch.ones(store.layout.nbytes, dtype=torch.bool)
    for start, stop in spans:
        assert torch.equal(part[start:stop], whole[start:stop])
        outside[start:stop] = False
    assert (part[outside] == 7).all()


def test_a_segment_reads_only_its_own_rows(checkpoint: Checkpoint) -> None:
    """The first 6 of 24 neurons take a quarter of gate and up, and all of down."""
    opened = open_model(str(checkpoint("olmoe")))
    layout = NeuronLayout.of(opened.layers[0], torch.float32, 9216)
    top = layout.segment(9216 // 4, is_bottom=False)
    assert layout.spans(opened.store.layout, top) == ((0, 768), (3072, 3840), (6144, 9216))
    bottom = layout.segment(9216 - 9216 // 4, is_bottom=True)
    assert layout.spans(opened.store.layout, bottom) == ((768, 3072), (3840, 6144), (6144, 9216))


def direct_or_skip(store: DiskStore) -> DiskStore:
    try:
        return store.direct()
    except BadInput as error:
        pytest.skip(str(error))
