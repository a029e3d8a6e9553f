"""Stored tensors by expert: those of a conversion that is more than copying, of another size or
number are refused."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

from artifacts.errors import BadInput
from artifacts.formats.fp8 import Scaled
from runtime.model.files import expert_tensors
from runtime.model.files.checkpoint import StoredTensor, open_checkpoint
from runtime.model.files.expert_tensors import LocatedExperts, locate_experts
from runtime.model.layout import ALIGNMENT
from runtime.model.open import MoeModel, open_model
from runtime.model.quantised.quantised_tensor import QuantisedTensor, Tensors
from tests.conftest import Checkpoint

UP = "model.layers.1.mlp.experts.3.up_proj.weight"
PLAIN = [MergeModulelist(dim=0), Concatenate(dim=1)]


@pytest.fixture(scope="module")
def hub(checkpoint: Checkpoint) -> MoeModel:
    return open_model(str(checkpoint("olmoe")))


def stored(checkpoint: Checkpoint, layout: str = "hub") -> dict[str, StoredTensor]:
    folder: Path = checkpoint("olmoe", layout)
    return open_checkpoint(folder).tensors


def located(
    opened: MoeModel, tensors: Tensors, mapping: Sequence[WeightTransform] | None = None
) -> LocatedExperts:
    return locate_experts(
        opened.model,
        opened.layers,
        shape=opened.shape,
        layout=opened.store.layout,
        tensors=tensors,
        mapping=mapping,
    )


@pytest.mark.parametrize("layout", ["hub", "fused"])
def test_every_stored_byte_belongs_to_one_expert_or_to_the_rest(
    hub: MoeModel, checkpoint: Checkpoint, layout: str
) -> None:
    tensors = stored(checkpoint, layout)
    found = located(hub, tensors)
    extents = [(each.offset, each.nbytes) for expert in found.extents for each in expert]
    rest = [(tensor.offset, tensor.nbytes) for tensor in found.others.values()]
    ends = sorted(extents + rest)
    assert all(
        first + nbytes == next_ for (first, nbytes), (next_, _) in zip(ends, ends[1:], strict=False)
    )
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
    hub: MoeModel,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[ConversionOps],
) -> None:
    _convert(monkeypatch, steps)
    with pytest.raises(
        BadInput, match="is stored in a way that moectl cannot read expert by expert"
    ):
        located(hub, stored(checkpoint))


def test_plain_copying_is_not_refused(
    hub: MoeModel, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    _convert(monkeypatch, PLAIN)
    assert located(hub, stored(checkpoint)) is not None


@pytest.mark.parametrize("shape", [(25, 32), (23, 32), (24, 33), (24,)])
def test_a_tensor_of_another_shape_is_refused(
    hub: MoeModel, checkpoint: Checkpoint, shape: tuple[int, ...]
) -> None:
    tensors = stored(checkpoint)
    tensors[UP] = replace(tensors[UP], shape=shape)
    with pytest.raises(
        BadInput, match=r"up_proj\.weight has shape .* where the config asks for \[24, 32\]"
    ):
        located(hub, tensors)


# Other names and layouts than a family's own

LAYERS = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def tensor(
    name: str, shape: tuple[int, ...], offset: int, dtype: torch.dtype = torch.float32
) -> StoredTensor:
    """A tensor of which only the header is there."""
    return StoredTensor(name, dtype, shape, None, offset, prod(shape) * dtype.itemsize)


def test_gate_and_up_may_be_fused_each_apart(hub: MoeModel) -> None:
    """As GGUF files have them."""
    num_experts = hub.shape.num_experts
    inner = (24, 32)
    down = (32, 24)
    mapping = [
        WeightConverter([r"\.gates$", r"\.ups$"], ".gate_up_proj", operations=[Concatenate(dim=1)]),
        WeightRenaming(r"\.downs$", ".down_proj"),
    ]
    nbytes = prod(inner) * 4
    found = {}
    for layer, name in enumerate(LAYERS):
        for kind, (part, shape) in enumerate({"gates": inner, "ups": inner, "downs": down}.items()):
            offset = (3 * layer + kind) * num_experts * nbytes
            found[f"{name}.{part}"] = tensor(f"{name}.{part}", (num_experts, *shape), offset)
    extents = located(hub, found, mapping).extents
    for key, expert in enumerate(extents):
        layer, number = divmod(key, num_experts)
        starts = [((3 * layer + kind) * num_experts + number) * nbytes for kind in range(3)]
        assert [each.offset for each in expert] == starts
        assert [(each.nbytes, each.stop - each.start) for each in expert] == [(nbytes, nbytes)] * 3
        assert expert[1].start == expert[0].stop
    del found[f"{LAYERS[1]}.ups"]
    with pytest.raises(BadInput, match=r"layer 1, expert 0: ups.* is missing from the checkpoint"):
        located(hub, found, mapping)


def test_a_rule_may_rename_the_part_with_the_number_of_an_expert(
    hub: MoeModel, checkpoint: Checkpoint
) -> None:
    own = expert_tensors.get_model_conversion_mapping(hub.model)
    tensors = stored(checkpoint)
    renamed = {name.replace(".experts.", ".experts.e"): each for name, each in tensors.items()}
    again = located(hub, renamed, [WeightRenaming(r"\.experts\.e(\d+)", r".experts.\1"), *own])
    offsets = [[each.offset for each in expert] for expert in located(hub, tensors).extents]
    assert [[each.offset for each in expert] for expert in again.extents] == offsets


def test_a_name_that_the_model_has_is_taken_as_it_is_where_a_rule_leads_nowhere(
    hub: MoeModel, checkpoint: Checkpoint
) -> None:
    tensors = stored(checkpoint, "fused")
    elsewhere = WeightRenaming(r"\.experts\.down_proj$", ".experts.nowhere")
    assert located(hub, tensors, [elsewhere]).extents == located(hub, tensors).extents


def test_a_name_that_the_model_has_may_be_stored_transposed(
    hub: MoeModel, checkpoint: Checkpoint
) -> None:
    tensors = stored(checkpoint, "fused")
    for layer in LAYERS:
        down = tensors[f"{layer}.down_proj"]
        tensors[f"{layer}.down_proj"] = replace(
            down, shape=(down.shape[0], *reversed(down.shape[1:]))
        )
    turned = WeightConverter("down_proj$", "down_proj", operations=[Transpose(1, 2)])
    for inner, down in located(hub, tensors, [turned]).extents:
        assert (inner.swapped, down.swapped) == (None, (24, 32))


def test_experts_that_are_stored_in_two_ways_begin_with_the_number_of_their_way(
    hub: MoeModel, checkpoint: Checkpoint
) -> None:
    tensors = dict(stored(checkpoint))
    weight = tensor(UP, (24, 32), 0, torch.float8_e4m3fn)
    scale = tensor(f"{UP}_scale", (24, 1), 24 * 32)
    tensors[UP] = QuantisedTensor(UP, Scaled(), {"weight": weight, "scale": scale}, (24, 32))
    found = located(hub, tensors)
    assert found.layout.codes == "mixed"
    quantised = hub.shape.num_experts + 3
    for key, (number, *others) in enumerate(found.extents):
        content = bytearray(1)
        number.shard.read_into(number.offset, [memoryview(content)])
        assert content[0] == (key == quantised)
        assert (number.nbytes, number.start, number.stop) == (1, 0, 1)
        assert (
            len(others) == 3 + (key == quantised)
            and min(each.start for each in others) == ALIGNMENT
        )


def _convert(monkeypatch: pytest.MonkeyPatch, steps: list[ConversionOps]) -> None:
    """Have transformers join gate and up by these steps."""
    names = ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"]
    gate_up = WeightConverter(names, "mlp.experts.gate_up_proj", operations=steps)
    down = WeightConverter(
        "mlp.experts.*.down_proj.weight", "mlp.experts.down_proj", operations=PLAIN[:1]
    )
    monkeypatch.setattr(
        expert_tensors, "get_model_conversion_mapping", lambda model: [gate_up, down]
    )
