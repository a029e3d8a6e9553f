"""Asked about a layer's own input, a prediction is the layer's selection, in every family of
transformers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from runtime.engine.router_ahead import ranked_first, reason_not_asked, routers_ahead
from runtime.engine.routers import Watcher
from runtime.model.layers import MoeLayer, moe_layers
from runtime.policies.prefetch.ahead import named
from runtime.policies.step import Step
from tests.helpers.registry import TEXT_FAMILIES, text_model

IDS = torch.tensor([[5, 17, 4, 90, 33, 8, 71], [8, 2, 61, 61, 12, 3, 44]])
E = 8
K = 2
H = 4


def opened_model(model: PreTrainedModel) -> SimpleNamespace:
    return SimpleNamespace(model=model, layers=moe_layers(model), family=model.config.model_type)


def first_steps(model: PreTrainedModel, distance: int) -> list[Step]:
    """The steps of a model's first pass, with predictions."""
    opened = opened_model(model)
    watcher = Watcher(opened)
    steps = []
    watcher.see_predictions(distance)
    for layer in opened.layers:

        def step(experts: nn.Module, args: tuple, index: int = layer.index) -> None:
            steps.append(watcher.step(index, *args[1:]))

        layer.experts.register_forward_pre_hook(step)
    with torch.inference_mode():
        watcher.begin_pass((), {"input_ids": IDS})
        model(input_ids=IDS, use_cache=False)
    return steps


def check_distribution(layer: MoeLayer, scores: torch.Tensor) -> None:
    """A router gives logits or the distribution itself; both come out as the distribution."""
    own = scores.float()[
        :, : layer.num_experts
    ]  # zaya's have a column more, for tokens that skip the layer
    is_distribution = bool((own >= 0).all()) and torch.allclose(
        own.sum(dim=1), torch.ones(len(own))
    )
    assert torch.equal(layer.distribution(scores), own if is_distribution else own.softmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_asked_about_its_own_input_a_router_names_what_it_selects(
    family: str, dtype: torch.dtype
) -> None:
    model = text_model(family, dtype)
    num_layers = len(moe_layers(model))
    for layer in moe_layers(model):
        layer.gate.register_forward_hook(
            lambda gate, args, output, layer=layer: check_distribution(layer, output[0])
        )
    steps = first_steps(model, num_layers)  # so many layers ahead of a layer is the layer itself
    assert len(steps) == num_layers
    for step in steps:
        own = step.predicted[:, -1]
        top_k = step.selected.shape[1]
        assert step.predicted.shape == (IDS.numel(), num_layers, own.shape[1])
        assert np.allclose(step.predicted.sum(axis=2), 1, atol=1e-5)
        highest = -np.sort(-own)[:, :top_k]
        chosen = -np.sort(-np.take_along_axis(own, step.selected, axis=1))
        assert np.array_equal(highest, chosen), (
            "bfloat16 gives some experts one value: any of them is the k-th"
        )
        for p, selected in zip(own, step.selected, strict=True):
            assert dtype == torch.bfloat16 or set(named(p[None], top_k)) == set(selected)


def test_families_are_all_there() -> None:
    assert len(TEXT_FAMILIES) > 50 and {
        "afmoe",
        "deepseek_v4",
        "hy_v3",
        "lfm2_moe",
        "minimax_m2",
    } <= {*TEXT_FAMILIES}


class Gate(nn.Module):
    """A router that selects by its matrix. `count` counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, H, generator=torch.Generator().manual_seed(1)))
        self.count = 0

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x.flatten(0, -2), self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.count += 1
        logits = self.logits(x)
        return logits, *self.select(logits)

    def select(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.softmax(-1).topk(K)


class Biased(Gate):
    """Its logits are more than a product by a bias, as gpt-oss's."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, E))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x.flatten(0, -2), self.weight, self.bias)


class Loud(Gate):
    """The softmax of its logits is 0 for most experts of a token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight.data *= 1000


class Doubled(Gate):
    """Its logits are not its product."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().logits(x)


class Grouped(Gate):
    """It selects in one of two groups, which no state of it says."""

    def select(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        groups = logits.softmax(-1).view(-1, 2, E // 2)
        best = groups.sum(-1, keepdim=True) == groups.sum(-1, keepdim=True).amax(1, keepdim=True)
        return (groups * best).flatten(1).topk(K)


class Corrected(Gate):
    """It has a correction bias that happens to be zero."""

    def __init__(self) -> None:
        super().__init__()
        self.correction = nn.Buffer(torch.zeros(E))


class Bare(Gate):
    """Its matrix is another module's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(H, E)
        del self.weight

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.flatten(0, -2))


class Told(Gate):
    """It may be told a correction bias."""

    def forward(
        self, x: torch.Tensor, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        logits = self.logits(x)
        return logits, *self.select(logits if correction is None else logits + correction)


class Block(nn.Module):
    """A MoE layer; `given` are tensors of its own."""

    def __init__(self, **given: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in given.items():
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Led(Block):
    """A MoE layer that another layer tells something."""

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return x + state


def opened(*gates: Gate, block: nn.Module | None = None) -> SimpleNamespace:
    layers = [
        MoeLayer(index, "block.experts", experts=None, gate=gate, top_k=K)
        for index, gate in enumerate(gates)
    ]
    return SimpleNamespace(
        layers=layers,
        family="fake",
        model=SimpleNamespace(get_submodule=lambda name: block or Block()),
    )


def some(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(1, 50, H, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("kind", [Gate, Biased, Loud])
def test_a_router_that_selects_by_its_matrix_gives_its_softmax_without_running(
    kind: type[Gate],
) -> None:
    gates = [kind(), kind()]
    routers = routers_ahead(opened(*gates))
    x = some()
    with torch.inference_mode():
        for router, gate in zip(routers, gates, strict=True):
            for tokens in (x, x[0], 2 * x):
                assert torch.equal(router.answer(tokens, None).p, gate.logits(tokens).softmax(-1))
    assert [gate.count for gate in gates] == [1, 0], "one of a kind is tried, on tokens of its own"


@pytest.mark.parametrize("kind", [Doubled, Grouped, Corrected, Bare])
def test_any_other_router_runs_whole(kind: type[Gate]) -> None:
    gate = kind()
    (router,) = routers_ahead(opened(gate))
    x = some()
    before = gate.count
    with torch.inference_mode():
        p = router.answer(x, None).p
        assert gate.count == before + 1
        logits, _, selected = gate(x)
    assert torch.equal(p.topk(K).indices.sort().values, selected.sort().values)
    assert torch.allclose(p.sort().values, logits.softmax(-1).sort().values)


def test_a_matrix_of_another_dtype_than_the_input_is_left_to_its_router() -> None:
    class Casting(Gate):
        def logits(self, x: torch.Tensor) -> torch.Tensor:
            return super().logits(x.float())

    gate = Casting()
    (router,) = routers_ahead(opened(gate))
    x = some(torch.bfloat16)
    with torch.inference_mode():
        assert torch.allclose(router.answer(x, None).p, gate.logits(x).softmax(-1))


def test_a_router_is_told_what_its_block_has() -> None:
    gate = Told()
    correction = torch.linspace(-3, 3, E)
    (router,) = routers_ahead(opened(gate, block=Block(correction=correction)))
    x = some()
    with torch.inference_mode():
        selected = gate(x, correction)[2]
        assert torch.equal(
            router.answer(x, None).p.topk(K).indices.sort().values, selected.sort().values
        )
        assert not torch.equal(selected.sort().values, gate(x)[2].sort().values)


def test_what_a_block_does_not_have_is_left_out_unless_another_layer_may_know_it() -> None:
    gate = Told()
    assert reason_not_asked(opened(gate)) is None
    (router,) = routers_ahead(opened(gate))
    x = some()
    with torch.inference_mode():
        assert torch.equal(router.answer(x, None).p.topk(K).indices, gate(x)[2])
    told = reason_not_asked(opened(gate, block=Led()))
    assert (
        told == "routers of fake cannot be asked ahead: only their own layer knows their correction"
    )


def test_the_largest_values_go_to_the_selected_and_all_keep_their_order() -> None:
    p = torch.tensor([[0.125, 0.5, 0.25, 0.125], [0.25, 0.25, 0.25, 0.25]])
    ranked = ranked_first(p, torch.tensor([[0, 2], [3, 1]]))
    assert ranked.argsort(descending=True, stable=True).tolist() == [[2, 0, 1, 3], [1, 3, 0, 2]]
    assert torch.allclose(ranked, torch.tensor([[0.25, 0.125, 0.5, 0.125], [0.25] * 4]))
    assert (ranked[1, [1, 3]] > ranked[1, [0, 2]].max()).all(), (
        "a tie between a selected expert and another"
    )
