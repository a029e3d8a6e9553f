"""Experts in RAM are page-locked layer by layer, without gaps, and unlocked again; no driver is
here, so that a stand-in notes what it would be asked."""

import gc

import pytest
import torch

from artifacts.errors import OutOfResources
from runtime.links import page_lock
from runtime.model.open import open_model
from runtime.tiers.ram import RamStore
from tests.conftest import Checkpoint


def pages(start: int, nbytes: int) -> range:
    return range(start // 4096, -(-(start + nbytes) // 4096))


class Driver:
    """Locks parts of memory up to `room` bytes; fails for pages that are locked already, as CUDA's
    does."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.parts = {}

    def cudaHostRegister(self, start: int, nbytes: int, flags: int) -> int:
        assert flags == 3, "portable and mapped"
        locked = {page for part in self.parts.items() for page in pages(*part)}
        if not locked.isdisjoint(pages(start, nbytes)):
            return 712
        if sum(self.parts.values()) + nbytes > self.room:
            return 2
        self.parts[start] = nbytes
        return 0

    def cudaHostUnregister(self, start: int) -> int:
        del self.parts[start]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver(1 << 40)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver


def test_every_byte_is_locked_once_layer_by_layer(checkpoint: Checkpoint, driver: Driver) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    ram = RamStore(opened.store, pin=True)
    plain = RamStore(opened.store)
    assert len(driver.parts) == opened.shape.num_layers
    ends = [ram.buffer.data_ptr()]
    for start, nbytes in sorted(driver.parts.items()):
        assert start == ends[-1]
        ends.append(start + nbytes)
    assert ends[-1] == ram.buffer.data_ptr() + ram.buffer.nbytes, "not a power of two either"
    assert ram.is_pinned and torch.equal(ram.buffer, plain.buffer)
    del ram
    gc.collect()
    assert not driver.parts
    opened.store.close()


def test_a_driver_that_locks_no_more_is_said_in_one_line(
    checkpoint: Checkpoint, driver: Driver
) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    driver.room = RamStore(opened.store).buffer.nbytes // 2 + 4096
    with pytest.raises(
        OutOfResources,
        match=r"page-locked [\d.]+ of [\d.]+ GiB of experts and no more .*--link disk",
    ):
        RamStore(opened.store, pin=True)
    gc.collect()
    assert not driver.parts, "what had been locked is given back"
    opened.store.close()


def test_what_does_not_fit_is_not_begun(
    checkpoint: Checkpoint, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    monkeypatch.setattr(page_lock, "host_memory", lambda: (1 << 40, 1 << 10))
    with pytest.raises(
        OutOfResources, match="GiB of page-locked memory, and 0.00 GiB are available"
    ):
        RamStore(opened.store, pin=True)
    opened.store.close()
