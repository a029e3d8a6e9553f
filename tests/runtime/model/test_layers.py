"""MoE layers are found by the flags of their modules, in any family; a model that has none, or odd
ones, is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from artifacts.errors import BadInput
from runtime.model.layers import MoeLayer, moe_layers
from tests.helpers.families import FAMILIES


def test_the_shapes_of_one_expert() -> None:
    # transposed, with biases
    plain = _first("olmoe")
    turned = _first("gpt_oss")
    assert plain.shapes == {"gate_up_proj": (48, 32), "down_proj": (32, 24)}
    assert turned.shapes["gate_up_proj"] == (32, 48) and turned.shapes["down_proj_bias"] == (32,)
    assert (plain.num_neurons, turned.num_neurons, plain.num_experts, turned.num_experts) == (
        24,
        24,
        8,
        4,
    )
    assert plain.neuron_weights == 3 * 32 and turned.neuron_weights == 3 * 32 + 2


def test_parameters_of_a_module_within_the_experts_are_none_of_an_experts() -> None:
    model = _Model(_Block(), _Block())
    for block in model.blocks:
        block.experts.inner = nn.Linear(7, 7)
    layer = moe_layers(model)[0]
    assert layer.shapes == {"up_proj": (4, 3), "down_proj": (3, 4)} and layer.num_experts == 2


def test_a_router_is_what_transformers_records_or_is_called_so() -> None:
    """The recorded class wins; a class, a recorder or a list of them is recorded."""
    for recorded in (_Recorded, OutputRecorder(_Recorded), [OutputRecorder(_Recorded, index=0)]):
        block = _Block()
        block.recorded = _Recorded()
        block._can_record_outputs = {"router_logits": recorded}
        assert [layer.gate for layer in moe_layers(_Model(block))] == [block.recorded]
    block = _Block()
    block._can_record_outputs = {"router_logits": OutputRecorder("no class")}
    block.router = nn.Linear(1, 1)
    assert moe_layers(_Model(block))[0].gate is block.gate


def test_top_k_is_the_gates_or_the_blocks_or_the_configs() -> None:
    block = _Block()
    assert moe_layers(_Model(block))[0].top_k == 2  # by the config
    block.top_k = 1
    assert moe_layers(_Model(block))[0].top_k == 1
    block.gate.top_k = 3
    assert moe_layers(_Model(block))[0].top_k == 3


def _without_experts(model: "_Model") -> None:
    for block in model.blocks:
        del block.experts


def _half_flagged(model: "_Model") -> None:
    for block in model.blocks:
        del block.experts.has_gate


def _without_router(model: "_Model") -> None:
    del model.blocks[1].gate


def _without_top_k(model: "_Model") -> None:
    model.blocks[0].top_k = None


def _without_neurons(model: "_Model") -> None:
    model.blocks[0].experts.up_proj = _weights(2, 0, 3)


def _one_more_expert(model: "_Model") -> None:
    model.blocks[2].experts.up_proj = _weights(3, 4, 3)


def _one_more_neuron(model: "_Model") -> None:
    model.blocks[1].experts.up_proj = _weights(2, 5, 3)


def _one_neuron_less(model: "_Model") -> None:
    model.blocks[1].experts.up_proj = _weights(2, 3, 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            _without_experts,
            "llama is not a Mixture-of-Experts model that moectl knows: it has no experts",
        ),
        (_half_flagged, "it has no experts"),
        (_without_router, "blocks.1 has no router module beside its experts"),
        (_without_top_k, "blocks.0 takes None experts per token: correct num_experts_per_tok"),
        (_without_neurons, "blocks.0.experts has experts of no neurons"),
        (
            _one_more_expert,
            "blocks.2.experts and blocks.0.experts differ in number, shape or top-k",
        ),
        (_one_more_neuron, "blocks.1.experts and blocks.0.experts differ"),
        (_one_neuron_less, "blocks.1.experts and blocks.0.experts differ"),
    ],
)
def test_what_is_refused(change: Callable[["_Model"], None], said: str) -> None:
    model = _Model(_Block(), _Block(), _Block())
    assert len(moe_layers(model)) == 3
    change(model)
    with pytest.raises(BadInput, match=said):
        moe_layers(model)


def _first(family: str) -> MoeLayer:
    return moe_layers(FAMILIES[family]()[1])[0]


def _weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


class _Config(LlamaConfig):
    num_experts_per_tok = 2


class _Experts(nn.Module):
    """Two experts of 3 inputs and 4 neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = _weights(2, 4, 3)
        self.down_proj = _weights(2, 3, 4)
        self.config = _Config()
        self.has_gate = False
        self.is_transposed = False


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 2)
        self.experts = _Experts()


class _Recorded(nn.Module):
    pass


class _Model(PreTrainedModel):
    config_class = _Config

    def __init__(self, *blocks: _Block) -> None:
        super().__init__(_Config())
        self.blocks = nn.ModuleList(blocks)
