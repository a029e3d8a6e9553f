"""Trial of a model before it is used: one pass without its experts, and the arithmetic of experts
on a few random weights.

A config may ask for something that the family's own code cannot do, or does in another way than
moectl. Such a model is refused here in one line; otherwise it would end the first request or change
its tokens.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from artifacts.errors import BadInput, first_line
from runtime.model.arithmetic import accumulate, assign, expert_forward, gather, weigh
from runtime.model.layers import MoeLayer

# of the random experts
_NUM_TOKENS = 6
_NUM_EXPERTS = 8
_NUM_NEURONS = 4


def try_model(model: PreTrainedModel, layers: tuple[MoeLayer, ...]) -> torch.dtype:
    """Run one pass of two tokens in which experts give zeros. Returns the dtype in which the family
    adds experts up. Raises BadInput if the pass fails, if a router takes another number of experts
    than its config says, or if the family adds its experts up in another way than moectl."""
    family = model.config.model_type
    if model.config.is_encoder_decoder:
        raise BadInput(
            f"the config.json says is_encoder_decoder, and {family} is a decoder only: correct it"
        )
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    sums: list[torch.dtype] = []
    try:
        with _without_experts(layers, sums), torch.inference_mode():
            model(input_ids=ids, use_cache=True)
    except BadInput:
        raise
    except (
        Exception
    ) as error:  # the family's code may raise anything on a config that does not fit it
        raise BadInput(
            f"transformers' {family} cannot run with this config.json: {first_line(error)}"
        ) from error
    return sums[0]


@contextmanager
def _without_experts(layers: tuple[MoeLayer, ...], sums: list[torch.dtype]) -> Iterator[None]:
    for layer in layers:
        layer.experts.forward = partial(_zeros, layer, sums)
    try:
        yield
    finally:
        for layer in layers:
            del layer.experts.forward


def _zeros(
    layer: MoeLayer,
    sums: list[torch.dtype],
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    if ids.shape[-1] != layer.top_k:
        raise BadInput(
            f"num_experts_per_tok is {layer.top_k}, and the router beside {layer.name} always "
            f"takes {ids.shape[-1]}: correct the config.json"
        )
    if layer.index == 0:
        sums.append(_sum_dtype(layer, hidden, weights.dtype))
    return torch.zeros_like(hidden)


def _sum_dtype(layer: MoeLayer, like: torch.Tensor, weights_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the sum with which `runtime.model.arithmetic` gives the bits of the
    module's own eager code, tried on a few narrow experts. Raises BadInput if there is none."""
    random = torch.Generator().manual_seed(0)
    experts = _narrow(layer, like, random)
    top_k = min(layer.top_k, _NUM_EXPERTS)
    hidden = torch.randn(_NUM_TOKENS, like.shape[-1], generator=random).to(like)
    weights = torch.rand(_NUM_TOKENS, top_k, generator=random).to(like.device, weights_dtype)
    ids = torch.rand(_NUM_TOKENS, min(_NUM_EXPERTS, layer.num_experts), generator=random).argsort(
        -1
    )[:, :top_k]
    eager = type(experts).forward.__wrapped__(experts, hidden, ids.to(like.device), weights)
    for dtype in dict.fromkeys((like.dtype, weights_dtype)):
        if torch.equal(eager, _added(experts, hidden, ids, weights, dtype)):
            return dtype
    raise BadInput(
        f"{type(layer.experts).__name__} adds up experts in {like.dtype} in another way than "
        "moectl, which would change tokens: such a model cannot be offloaded"
    )


def _added(
    experts: nn.Module,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the output of `experts` as moectl computes it, with sums in `dtype`."""
    out = torch.zeros_like(hidden, dtype=dtype)
    for expert, assigned in sorted(assign(ids.numpy(), hidden.device).items()):
        views = {
            name: parameter[expert] for name, parameter in experts.named_parameters(recurse=False)
        }
        y = expert_forward(experts, views, gather(hidden, assigned))
        accumulate(out, weigh(y, weights, assigned), assigned)
    return out.to(hidden.dtype)


def _narrow(layer: MoeLayer, like: torch.Tensor, random: torch.Generator) -> nn.Module:
    """Return the experts module with a few random experts of a few neurons."""
    hidden = like.shape[-1]
    experts = copy.copy(layer.experts)
    sizes = {"gate_up_proj": (2 * _NUM_NEURONS, hidden), "up_proj": (_NUM_NEURONS, hidden)}
    sizes["down_proj"] = (hidden, _NUM_NEURONS)
    experts._parameters = {}
    for name in layer.shapes:
        size = sizes[name.removesuffix("_bias")]
        size = size[:1] if name.endswith("_bias") else size[:: -1 if experts.is_transposed else 1]
        values = torch.randn(min(_NUM_EXPERTS, layer.num_experts), *size, generator=random)
        experts._parameters[name] = nn.Parameter(values.to(like), requires_grad=False)
    return experts
