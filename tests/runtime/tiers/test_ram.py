"""Experts come into RAM by several threads, and are page-locked while others are still read."""

import threading
import time
from pathlib import Path

import pytest
import torch

from artifacts.errors import BadInput
from artifacts.shape import Shape
from runtime.model.files.read_bytes import READ
from runtime.model.layout import ExpertLayout, ExpertStore
from runtime.model.open import open_model
from runtime.tiers import ram as module
from runtime.tiers.ram import RamStore
from tests.conftest import Checkpoint

LAYERS = 3
EXPERTS = 8
TIMEOUT_S = 20.0


class Disk(ExpertStore):
    """Experts whose bytes are their keys. The last waits for `may_end`; `broken` cannot be read."""

    layout = ExpertLayout.of({"up_proj": (4, 16), "down_proj": (16, 4)}, torch.float32)
    shape = Shape(LAYERS, EXPERTS, 2, layout.nbytes, 4, 128)

    def __init__(self, *, broken: int = -1) -> None:
        self.may_end = threading.Event()
        self.may_end.set()
        self.broken = broken
        self.threads: dict[int, int] = {}  # of torch, by the key that is read
        self.names: set[str] = set()

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None:
        key = layer * EXPERTS + expert
        self.threads[key] = torch.get_num_threads()
        self.names.add(threading.current_thread().name)
        if -1 < self.broken < key:
            time.sleep(0.01)  # in which the caller learns of the error
        if key == self.broken:
            raise BadInput(f"{key} is broken")
        if key == LAYERS * EXPERTS - 1:
            assert self.may_end.wait(TIMEOUT_S), "the first layer was to be locked meanwhile"
        out.fill_(key)


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "num_cores", lambda: 3)


def test_a_thread_a_core_reads_and_torch_has_one_in_each() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        disk = Disk()
        ram = RamStore(disk)
        assert torch.get_num_threads() == 2, "the caller has its own again"
    finally:
        torch.set_num_threads(before)
    assert sorted(disk.threads) == [*range(disk.shape.num_keys)]
    assert {*disk.threads.values()} == {1}
    assert threading.current_thread().name not in disk.names and len(disk.names) <= 3
    for key in range(disk.shape.num_keys):
        assert (ram.view(*divmod(key, EXPERTS)) == key).all()


def test_layers_are_locked_while_later_ones_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()
    disk.may_end.clear()

    class Lock:
        def __init__(self, buffer: torch.Tensor, owner: object) -> None:
            self.rows = buffer

        def lock_to(self, nbytes: int) -> None:
            num_written = nbytes // self.rows.shape[1]
            assert (self.rows[:num_written, 0] == torch.arange(num_written)).all()
            disk.may_end.set()

    monkeypatch.setattr(module, "PageLock", Lock)
    monkeypatch.setattr(module, "check_budget", lambda nbytes: None)
    assert RamStore(disk, pin=True).is_pinned


def test_an_error_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "num_cores", lambda: 1)
    disk = Disk(broken=2)
    before = torch.get_num_threads()
    with pytest.raises(BadInput, match="2 is broken"):
        RamStore(disk)
    assert len(disk.threads) < disk.shape.num_keys, "what had not begun is not read"
    assert torch.get_num_threads() == before


def test_each_byte_of_a_checkpoint_is_read_once(checkpoint: Checkpoint) -> None:
    before = READ.nbytes
    folder = Path(checkpoint("olmoe", "fused"))
    opened = open_model(str(folder))
    RamStore(opened.store)
    in_files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert READ.nbytes - before == in_files
    opened.store.close()
