"""Stores of experts: reads from disk and RAM, and files that change while a store is open."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from artifacts.errors import BadInput
from artifacts.shape import Shape
from runtime.model.files import direct_io
from runtime.model.files.checkpoint import open_checkpoint
from runtime.model.files.expert_store import DiskStore, Extent, num_reads
from runtime.model.layout import ExpertLayout, Spans, aligned
from runtime.model.open import open_model
from runtime.tiers.neuron_major import NeuronLayout
from runtime.tiers.ram import RamStore
from tests.conftest import Checkpoint
from tests.helpers.families import LAYOUTS, save
from tests.helpers.safetensors import Tensors, joined

NAN = float("nan")
# 256, then 120 and 8 more
BY_HAND = ExpertLayout.of({"gate_up_proj": (4, 16), "down_proj": (10, 3)}, torch.float32)
PLACES = {"gate": (0, 128), "up": (128, 256), "down": (256, 376), "": ()}  # "" is a gap in the file
FILES = {  # tensors in their order: the expert's key, and which of its tensors
    "a": ["0down", "0gate", "0up", "1gate", "1down", "1up", "2down"],
    "b": ["2gate", "2", "2up", "3up", "3gate", "3down"],
}


def test_a_slot_may_be_longer_than_an_expert(store: DiskStore) -> None:
    exact = aligned(store.layout.nbytes)
    longer = aligned(store.layout.nbytes + 640).fill_(7)
    store.read(1, 2, exact)
    store.read(1, 2, longer)
    assert torch.equal(exact, longer[: store.layout.nbytes])
    assert (longer[store.layout.nbytes :] == 7).all()


def test_ram_holds_the_bytes_on_disk(store: DiskStore) -> None:
    counts: list[int] = []
    ram = RamStore(store, progress=counts.append)
    assert counts == list(range(1, store.shape.num_keys + 1))
    assert (ram.layout, ram.shape) == (store.layout, store.shape)
    expected = aligned(store.layout.nbytes)
    got = aligned(store.layout.nbytes)
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
    with pytest.raises(
        BadInput, match=r"model\.safetensors ends before byte \d+: it changed while in use"
    ):
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
def test_direct_reads_give_the_same_bytes(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "_CHUNK", 4096)  # less than an expert
    folder = save("olmoe", layout, tmp_path)
    store = open_model(str(folder)).store
    direct = direct_or_skip(store)
    got = aligned(store.layout.nbytes)
    expected = RamStore(store)
    for key in range(store.shape.num_keys):
        place = divmod(key, store.shape.num_experts)
        direct.read(*place, got.zero_())
        assert torch.equal(got, expected.view(*place))
    os.truncate(folder / "model.safetensors", 30_000)
    with pytest.raises(
        BadInput, match=r"model\.safetensors ends before byte \d+: it changed while in use"
    ):
        RamStore(direct)


def test_direct_reads_convert_dtypes_too(checkpoint: Checkpoint) -> None:
    store = open_model(str(checkpoint("olmoe")), dtype=torch.bfloat16).store
    expected = aligned(store.layout.nbytes)
    got = aligned(store.layout.nbytes)
    store.read(1, 3, expected)
    direct_or_skip(store).read(1, 3, got)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spans_of_an_expert_equal_those_of_the_whole(
    checkpoint: Checkpoint, dtype: torch.dtype
) -> None:
    """The checkpoint is float32; it is read unchanged, or converted."""
    store = open_model(str(checkpoint("olmoe")), dtype=dtype).store
    whole = aligned(store.layout.nbytes)
    part = aligned(store.layout.nbytes).fill_(7)
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


def test_every_expert_is_where_its_tensors_are(tmp_path: Path) -> None:
    """Tensors of one expert follow each other in another order, have a gap between them, are in two
    files, or of another dtype."""
    store = by_hand(tmp_path)
    for key in range(4):
        assert torch.equal(read(store, key), values(key))


def test_adjacent_tensors_are_one_read(tmp_path: Path) -> None:
    extents = by_hand(tmp_path)._extents
    assert [num_reads(each) for each in extents] == [1, 1, 3, 2]
    narrow = [[replace(extent, slot_dtype=torch.bfloat16) for extent in each] for each in extents]
    assert [num_reads(each) for each in narrow] == [3, 3, 3, 3]


@pytest.mark.parametrize(
    "spans", [((0, 4),), ((128, 256),), ((0, 256),), ((64, 72), (124, 260)), ((200, 376),)]
)
def test_spans_of_every_expert_are_read_and_no_other_bytes(tmp_path: Path, spans: Spans) -> None:
    store = by_hand(tmp_path)
    for key in range(4):
        got = read(store, key, spans=spans)
        inside = torch.zeros(94, dtype=torch.bool)
        for start, stop in spans:
            inside[start // 4 : stop // 4] = True
        assert torch.equal(got[inside], values(key)[inside]) and got[~inside].isnan().all()


def test_a_part_that_was_finite_says_nothing_of_the_rest(tmp_path: Path) -> None:
    """Each part is checked when it is first read, whatever was read before."""
    store = by_hand(tmp_path, damaged="2down")
    for _ in range(2):
        read(store, 2, spans=((0, 256),))
        for spans in ((), ((200, 376),), ((256, 376),)):
            with pytest.raises(
                BadInput, match="layer 1, expert 0: down_proj holds NaN or infinity"
            ):
                read(store, 2, spans=spans)


def test_what_was_checked_is_not_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = by_hand(tmp_path)
    checked = []
    monkeypatch.setattr(ExpertLayout, "fault", lambda layout, out, spans: checked.append(spans))
    for spans in ((), ((0, 256),), (), ((0, 256),)):
        read(store, 1, spans=spans)
    assert checked == [((0, 384),), ((0, 256),)]


def test_the_page_cache_gives_only_whole_checked_unchanged_experts(tmp_path: Path) -> None:
    store = by_hand(tmp_path)
    out = aligned(BY_HAND.nbytes).fill_(255)
    assert not store.read_kept(0, 1, out)
    read(store, 1, spans=((0, 256),))
    assert not store.read_kept(0, 1, out), "only a part of it was checked"
    read(store, 1), read(store, 2), read(store, 3)
    if not store._extents[0][0].shard.read_kept(0, [memoryview(bytearray(8))]):
        pytest.skip("this system does not tell what the page cache has")
    assert store.read_kept(0, 1, out) and torch.equal(floats(out), values(1))
    assert store.read_kept(1, 0, out) and torch.equal(floats(out), values(2))
    assert not store.read_kept(1, 1, out), "a part of it is converted"
    assert not direct_or_skip(store).read_kept(0, 1, out)


def by_hand(folder: Path, damaged: str = "") -> DiskStore:
    """Two layers of two experts, of 94 numbers each, in FILES; one of expert 3's tensors has
    another dtype."""
    for file, names in FILES.items():
        parts = {name: _stored(name, is_damaged=name == damaged) for name in names}
        folder.joinpath(f"{file}.safetensors").write_bytes(joined(Tensors.together(parts)))
    index = {
        "weight_map": {
            name: f"{file}.safetensors" for file, names in FILES.items() for name in names
        }
    }
    folder.joinpath("model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(folder)
    extents: list[list[Extent]] = [[] for _ in range(4)]
    for name, tensor in checkpoint.tensors.items():
        if place := PLACES[name[1:]]:
            stored = tensor.shard, tensor.dtype, tensor.offset, tensor.nbytes
            extents[int(name[0])].append(Extent(*stored, *place, BY_HAND.dtype))
    shape = Shape(num_layers=2, num_experts=2, top_k=1, expert_nbytes=BY_HAND.nbytes)
    return DiskStore(checkpoint, BY_HAND, shape=shape, extents=extents)


def _stored(name: str, *, is_damaged: bool) -> tuple[str, list[int], bytes]:
    kind, dtype = ("BF16", torch.bfloat16) if name == "3up" else ("F32", torch.float32)
    content = torch.full((5,), 9.0)
    if place := PLACES[name[1:]]:
        content = values(int(name[0]))[place[0] // 4 : place[1] // 4]
    if is_damaged:
        content[7] = NAN
    return kind, [len(content)], content.to(dtype).view(torch.uint8).numpy().tobytes()


def values(key: int) -> torch.Tensor:
    """The numbers of an expert, exact in bfloat16 too."""
    return torch.arange(94.0) + key / 8 if key < 3 else torch.arange(94.0) - 47


def read(store: DiskStore, key: int, *, spans: Spans = ()) -> torch.Tensor:
    out = aligned(BY_HAND.nbytes).fill_(255)  # as float32: NaN
    store.read(*divmod(key, 2), out, spans=spans)
    return floats(out)


def floats(slot: torch.Tensor) -> torch.Tensor:
    return slot.view(torch.float32)[:94].clone()
