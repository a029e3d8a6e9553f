"""The weights outside the experts in one piece of memory."""

import pytest
import torch
from torch import nn

from runtime.model import dense_memory
from runtime.model.dense_memory import gather, on_cpu
from runtime.model.huge_pages import HUGE_PAGE, anonymous


@pytest.fixture
def model() -> nn.Module:
    """Linear layers of 1 MiB: one, one tied to it, a transposed view of half of a storage, one on
    `meta`."""
    model = nn.ModuleDict(
        {name: nn.Linear(512, 512, bias=name == "own") for name in ("own", "tied", "view", "alone")}
    )
    model["tied"].weight = model["own"].weight
    model["view"].weight = nn.Parameter(torch.randn(1024, 512)[512:].T)
    model["absent"] = nn.Linear(512, 512, device="meta")
    return model.requires_grad_(False)


@pytest.fixture(autouse=True)
def huge_pages_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_memory, "mode", lambda: "madvise")


def test_values_views_and_ties_stay(model: nn.Module) -> None:
    before = {name: value.clone() for name, value in model.named_parameters() if not value.is_meta}
    addresses = [parameter.data_ptr() for parameter in on_cpu(model)]
    gather(model)
    after = dict(model.named_parameters())
    assert len(before) == 4 and all(
        torch.equal(after[name], value) for name, value in before.items()
    )
    assert model["tied"].weight is model["own"].weight and not model["view"].weight.is_contiguous()
    assert not set(addresses) & {parameter.data_ptr() for parameter in on_cpu(model)}
    starts = [parameter.untyped_storage().data_ptr() for parameter in on_cpu(model)]
    assert all(start % 64 == 0 for start in starts) and max(starts) - min(starts) < 5 << 20
    assert max(parameter.untyped_storage().nbytes() for parameter in on_cpu(model)) == 2 << 20


def test_parameters_of_one_storage_go_on_sharing_it(model: nn.Module) -> None:
    both = torch.randn(2, 512, 512)
    model["own"].weight.data = both[0]
    model["alone"].weight.data = both[1]
    gather(model)
    assert model["alone"].weight.data_ptr() - model["own"].weight.data_ptr() == both[0].nbytes
    assert torch.equal(model["own"].weight, both[0]) and torch.equal(model["alone"].weight, both[1])


def test_what_was_read_into_huge_pages_stays(model: nn.Module) -> None:
    model["alone"].weight.data = read = (
        anonymous(HUGE_PAGE).view(torch.float32)[: 512 * 512].view(512, 512)
    )
    gather(model)
    assert model["alone"].weight.data_ptr() == read.data_ptr()


@pytest.mark.parametrize("mode", ["never", "none"])
def test_nothing_moves_where_there_are_no_huge_pages(
    mode: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_memory, "mode", lambda: mode)
    addresses = [parameter.data_ptr() for parameter in on_cpu(model)]
    gather(model)
    assert [parameter.data_ptr() for parameter in on_cpu(model)] == addresses


def test_less_than_a_huge_page_stays() -> None:
    layer = nn.Linear(512, 1000)
    addresses = [parameter.data_ptr() for parameter in on_cpu(layer)]
    gather(layer)
    assert [parameter.data_ptr() for parameter in on_cpu(layer)] == addresses
