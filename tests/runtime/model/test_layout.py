"""Slots: where the parts of an expert lie, and memory for them."""

import pytest
import torch

from artifacts.errors import OutOfResources
from runtime.model.files.direct_io import PAGE
from runtime.model.layout import ExpertLayout, aligned, fill, is_finite, round_up

BIASED = {"gate_up_proj": (3, 5), "gate_up_proj_bias": (3,), "down_proj": (5, 13)}


def test_parts_are_aligned_to_64_bytes() -> None:
    layout = ExpertLayout.of(BIASED, torch.bfloat16)
    assert [(part.offset, part.nbytes) for part in layout.parts] == [(0, 30), (64, 6), (128, 130)]
    assert layout.nbytes == 320


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_round_up(nbytes: int, expected: int) -> None:
    assert round_up(nbytes) == expected


def test_views_share_the_buffer() -> None:
    layout = ExpertLayout.of({"up_proj": (3, 5), "down_proj": (5, 3)}, torch.float32)
    buffer = aligned(layout.nbytes + 64).zero_()
    views = layout.views(buffer)
    views["down_proj"][4, 2] = 1.0
    assert {name: tuple(view.shape) for name, view in views.items()} == {
        "up_proj": (3, 5),
        "down_proj": (5, 3),
    }
    assert buffer[64:124].view(torch.float32)[-1] == 1.0
    assert all(view.data_ptr() % 64 == 0 for view in views.values())


def test_one_part_of_several_experts() -> None:
    layout = ExpertLayout.of(BIASED, torch.float32)
    memory = torch.arange(30.0).view(torch.uint8)
    several = layout.several(layout.parts[0], memory)
    assert (
        torch.equal(several, torch.arange(30.0).view(2, 3, 5))
        and several.data_ptr() == memory.data_ptr()
    )


@pytest.mark.parametrize("nbytes", [1, PAGE, 5 * PAGE + 64])
def test_memory_begins_on_a_page_and_has_the_size(nbytes: int) -> None:
    blocks = [aligned(nbytes) for _ in range(4)]
    assert all(block.data_ptr() % PAGE == 0 and block.shape == (nbytes,) for block in blocks)
    assert all(block.dtype == torch.uint8 and not block.is_pinned() for block in blocks)
    assert all(block.untyped_storage().nbytes() <= nbytes + PAGE for block in blocks)


def test_page_locked_memory_is_as_long_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    empty = torch.empty

    def not_locked(nbytes: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        asked.append((nbytes, pin_memory))
        return empty(nbytes, dtype=dtype)

    monkeypatch.setattr(torch, "empty", not_locked)
    assert aligned(640, pin=True).shape == (640,) and asked == [(640, True)]


def test_no_room_is_told_in_gib() -> None:
    with pytest.raises(
        OutOfResources, match=r"^no room for 2097152\.00 GiB of memory: leave the experts on disk$"
    ):
        aligned(2**51)


def test_filling_keeps_the_rest_of_a_longer_slot() -> None:
    content = torch.arange(3, dtype=torch.uint8)
    same = torch.full((3,), 7, dtype=torch.uint8)
    longer = torch.full((5,), 7, dtype=torch.uint8)
    fill(same, content)
    fill(longer, content)
    assert same.tolist() == [0, 1, 2] and longer.tolist() == [0, 1, 2, 7, 7]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_found(value: float) -> None:
    values = torch.zeros(3, 4, dtype=torch.bfloat16)
    assert is_finite(values)
    values[1, 2] = value
    assert not is_finite(values)
