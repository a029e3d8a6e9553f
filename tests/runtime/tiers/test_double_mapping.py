"""The same memory mapped slot after slot and part after part, and which slots have both
mappings."""

import gc

import pytest
import torch

from runtime.control.pools import Pool
from runtime.model.files.direct_io import PAGE
from runtime.model.layout import Part
from runtime.tiers.double_mapping import map_twice
from runtime.tiers.slots import Slots

BYTES = torch.uint8
PARTS = (
    Part("gate_up_proj", BYTES, (2, PAGE)),
    Part("down_proj", BYTES, (1, PAGE), 2 * PAGE),
)
NBYTES = 3 * PAGE
CPU = torch.device("cpu")


def test_either_mapping_reads_what_the_other_wrote() -> None:
    by_slot, by_part = map_twice(5, PARTS)
    slots = by_slot.view(5, NBYTES)
    slots.copy_(torch.randint(256, (5, NBYTES), dtype=torch.uint8, generator=torch.manual_seed(0)))
    assert torch.equal(by_part["gate_up_proj"], slots[:, : 2 * PAGE])
    assert torch.equal(by_part["down_proj"], slots[:, 2 * PAGE :])
    by_part["down_proj"][3, 7] = 77
    assert slots[3, 2 * PAGE + 7] == 77
    assert all(part.is_contiguous() and part.data_ptr() % PAGE == 0 for part in by_part.values())


def test_either_mapping_outlives_the_other() -> None:
    by_slot, by_part = map_twice(2, PARTS)
    by_slot.fill_(5)
    del by_slot
    gc.collect()
    assert set(by_part["down_proj"].unique().tolist()) == {5}
    by_slot, by_part = map_twice(2, PARTS)
    by_part["down_proj"].fill_(6)
    del by_part
    gc.collect()
    assert set(by_slot[2 * PAGE : NBYTES].tolist()) == {6}


def test_parts_that_share_a_page_are_not_mapped_twice() -> None:
    assert map_twice(2, (Part("down_proj", BYTES, (64,)),)) is None


def test_systems_without_such_mappings_have_slots_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> int:
        raise OSError("no file descriptors are left")

    monkeypatch.setattr("os.memfd_create", refused)
    assert map_twice(2, PARTS) is None
    slots = Slots([Pool(0, 8, 2, NBYTES)], [CPU], parts=PARTS)
    assert not slots.by_part and len(slots[1]) == NBYTES


def test_a_few_slots_of_one_size_are_mapped_by_part() -> None:
    slots = Slots([Pool(0, 4, 2, NBYTES), Pool(4, 8, 1, NBYTES)], [CPU], parts=PARTS)
    for number in range(3):
        slots[number].fill_(number)
    assert slots.nbytes == 3 * NBYTES and slots.starts == [0, NBYTES, 2 * NBYTES]
    assert [row.unique().tolist() for row in slots.by_part["gate_up_proj"]] == [[0], [1], [2]]


@pytest.mark.parametrize(
    "pools",
    [
        pytest.param([Pool(0, 8, 1, NBYTES)], id="one"),
        pytest.param([Pool(0, 8, 800, NBYTES)], id="more than a cache holds"),
        pytest.param([Pool(0, 8, 3, PAGE)], id="of another size"),
        pytest.param([Pool(0, 8, 1, NBYTES), Pool(0, 8, 1, PAGE)], id="of several sizes"),
        pytest.param(
            [Pool(0, 8, 1, NBYTES), Pool(0, 8, 1, NBYTES, device=1)], id="on several devices"
        ),
    ],
)
def test_other_slots_are_not_mapped_by_part(pools: list[Pool]) -> None:
    slots = Slots(pools, [CPU, CPU], parts=PARTS)
    assert not slots.by_part and len(slots) == sum(pool.num_slots for pool in pools)
