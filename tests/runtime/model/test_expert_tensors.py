"""Stored tensors by expert: those of a conversion that is more than copying, of another size or number are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, Transpose, WeightConverter

from artifacts.errors import BadInput
from runtime.model import expert_tensors
from runtime.model.checkpoint import StoredTensor, open_checkpoint
from runtime.model.expert_tensors import LocatedExperts, locate_experts
from runtime.model.open import MoeModel, open_model
from tests.conftest import Checkpoint

UP = "model.layers.1.mlp.experts.3.up_proj.weight"
PLAIN = [MergeModulelist(dim=0), Concatenate(dim=1)]


@pytest.fixture(scope="module")
def hub(checkpoint: Checkpoint) -> MoeModel:
    return open_model(str(checkpoint("olmoe")))


def stored(checkpoint: Checkpoint, layout: str = "hub") -> dict[str, StoredTensor]:
    folder: Path = checkpoint("olmoe", layout)
    return open_checkpoint(folder).tensors


def located(opened: MoeModel, tensors: dict[str, StoredTensor]) -> LocatedExperts:
    return locate_experts(opened.model, opened.layers, shape=opened.shape, layout=opened.store.layout, tensors=tensors)


@pytest.mark.parametrize("layout", ["hub", "fused"])
def test_every_stored_byte_belongs_to_one_expert_or_to_the_rest(
    hub: MoeModel, checkpoint: Checkpoint, layout: str
) -> None:
    tensors = stored(checkpoint, layout)
    found = located(hub, tensors)
    extents = [(each.offset, each.nbytes) for expert in found.extents for each in expert]
    rest = [(tensor.offset, tensor.nbytes) for tensor in found.others.values()]
    ends = sorted(extents + rest)
    assert all(first + nbytes == next_ for (first, nbytes), (next_, _) in zip(ends, ends[1:], strict=False))
    assert sum(nbytes for _, nbytes in ends) == sum(tensor.nbytes for tensor in tensors.values())
    assert found.others.keys() == {name for name in tensors if ".experts." not in name}


@pytest.mark.parametrize(
    "steps",
    [
        [MergeModulelist(dim=1), Concatenate(dim=1)],
        [MergeModulelist(dim=0), Concatenate(dim=0)],
        [MergeModulelist(dim=0), Concatenate(dim=2)],
        [Concatenate(dim=1), MergeModulelist(dim=0)],
        [Concatenate(dim=1)],
        [Transpose(1, 2)],
        [*PLAIN, Transpose(1, 2)],
        [Transpose(1, 2), *PLAIN],
        [*PLAIN, Concatenate(dim=1)],
    ],
)
def test_a_conversion_that_is_more_than_copying_is_refused(
    hub: MoeModel, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, steps: list[ConversionOps]
) -> None:
    _convert(monkeypatch, steps)
    with pytest.raises(BadInput, match="is stored in a way that moectl cannot read expert by expert"):
        located(hub, stored(checkpoint))


def test_plain_copying_is_not_refused(hub: MoeModel, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    _convert(monkeypatch, PLAIN)
    assert located(hub, stored(checkpoint)) is not None


@pytest.mark.parametrize("shape", [(25, 32), (23, 32), (24, 33), (24,)])
def test_a_tensor_of_another_shape_is_refused(hub: MoeModel, checkpoint: Checkpoint, shape: tuple[int, ...]) -> None:
    tensors = stored(checkpoint)
    tensors[UP] = replace(tensors[UP], shape=shape)
    with pytest.raises(BadInput, match=r"up_proj\.weight has shape .* where the config asks for \[24, 32\]"):
        located(hub, tensors)


def _convert(monkeypatch: pytest.MonkeyPatch, steps: list[ConversionOps]) -> None:
    """Have transformers join gate and up by these steps."""
    names = ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"]
    gate_up = WeightConverter(names, "mlp.experts.gate_up_proj", operations=steps)
    down = WeightConverter("mlp.experts.*.down_proj.weight", "mlp.experts.down_proj", operations=PLAIN[:1])
    monkeypatch.setattr(expert_tensors, "get_model_conversion_mapping", lambda model: [gate_up, down])
