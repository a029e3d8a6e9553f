"""Consecutive layers of a decoder in one compiled call for a few tokens, as long as there is
nothing to decide about experts."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from runtime.kernels.cpu.decoder.compiled_attention import CacheRoom, CompiledBlock, Turn
from runtime.kernels.cpu.decoder.compiled_norm import like_of, norm_operand
from runtime.kernels.cpu.decoder.compiled_router import CompiledRouter
from runtime.kernels.cpu.dense import linear_operand
from runtime.kernels.decoder.attention import Angles, first_of
from runtime.kernels.load import kernels
from runtime.model.layers import MoeLayer

_NUM_TRIED = 3  # tokens on which a mixer's use of its experts is tried


class WholeExperts(NamedTuple):
    """Addresses and layout of the experts of all layers.

    `starts` [L, E] are the addresses of experts (0: absent), `matrices` [L, 3, 2] the kinds and
    places of their matrices, `num_neurons` the number of their neurons. `replicas` stand for absent
    experts, in the layout of `whole_layer`."""

    starts: np.ndarray
    matrices: np.ndarray
    num_neurons: int
    replicas: tuple

    def layer(self, index: int) -> tuple:
        """Return the replicas of one layer."""
        functions, addresses, sizes, rotations = self.replicas
        return functions, addresses[index], sizes[index], rotations


class ExpertsInPlace(Protocol):
    """Interface of the object that knows where experts are, and counts their use. While it
    `is_drafting`, nobody looks on: hooks are not called."""

    is_drafting: bool

    def whole(self) -> WholeExperts | None:
        """Return the experts of all layers, or None if there is something to decide about them."""

    def count(self, first: int, chosen: torch.Tensor) -> None:
        """Count the T tokens that n layers from number `first` on computed with the experts
        `chosen` [n, T, K]."""


class CompiledLayers:
    """All layers of a decoder, whose mixers are routers and experts and no more."""

    def __init__(
        self, blocks: Sequence[CompiledBlock], routers: Sequence[CompiledRouter], hooks: list[dict]
    ) -> None:
        parts = blocks[0].parts
        heads = blocks[0].parts.attention.heads
        self.experts: ExpertsInPlace | None = None
        self._blocks = blocks
        self._routers = routers
        self._hooks = hooks
        self._routing = routers[0].routing
        self._dtype = heads.dtype
        self._attention = parts.attention
        self._num_experts = routers[0].num_experts
        self._linears = np.array(
            [[linear_operand(layer) for layer in block.linear] for block in blocks]
        )
        norms = [[norm_operand(norm) for norm in block.parts.norms] for block in blocks]
        self._norms = np.array([[(*own[:2], own[3]) for own in each] for each in norms])
        scalings = [block.parts.attention.heads.scaling for block in blocks]
        self._floats = np.array(
            [(*(own[2] for own in each), own) for each, own in zip(norms, scalings, strict=True)]
        )
        sinks = [block.parts.attention.heads.sinks_address for block in blocks]
        self._more = np.array(
            [(own, *router.operand[:2]) for own, router in zip(sinks, routers, strict=True)]
        )
        self._run = partial(
            kernels("cpu.decoder.layers").compute_layers,
            (self._linears, self._norms, self._floats, self._more),
            (heads.query.in_features, heads.sizes, parts.attention.rotation.order),
            routers[0].how,
        )
        self._like = like_of(heads.dtype)

    @classmethod
    def of(
        cls,
        layers: Sequence[MoeLayer],
        blocks: Sequence[CompiledBlock],
        routers: Mapping[nn.Module, CompiledRouter],
    ) -> "CompiledLayers | None":
        """Return the compiled layers if `blocks` are those of all layers, or None if layers differ
        or have other parts."""
        own = [routers.get(layer.gate) for layer in layers]
        if len(blocks) != len(layers) or None in own:
            return None
        if len({_kind(*each) for each in zip(blocks, own, strict=True)}) > 1:
            return None
        tried = zip(layers, blocks, own, strict=True)
        if not all(_is_router_and_experts(layer, block, router) for layer, block, router in tried):
            return None
        modules = [module for block in blocks for module in block.module.modules()]
        return cls(
            blocks,
            own,
            [each for own in modules for each in (own._forward_hooks, own._forward_pre_hooks)],
        )

    def run(
        self,
        first: int,
        x: torch.Tensor,
        past: DynamicCache,
        mask: torch.Tensor | None,
        angles: Angles,
    ) -> int:
        """Compute the tokens x [1, T, H] of one sequence in place by layers from number `first` on,
        and return the number of layers computed."""
        whole = self.experts.whole()
        if (
            whole is None
            or any(self._hooks)
            and not self.experts.is_drafting
            or not self._attention.takes(x, past, mask, position_embeddings=angles)
        ):
            return 0
        caches = [past.layers[block.parts.attention.layer_index] for block in self._blocks]
        if any(layer.keys.dtype is not self._dtype for layer in caches):
            return 0
        ids, normalised, done = self._computed(
            first, x, caches, self._attention.turn(angles), whole
        )
        for layer in caches[first : done + 1]:
            CacheRoom.of(layer, x.shape[1]).extend(layer, x.shape[1])
        self.experts.count(first, ids[first:done])
        if done == len(caches):
            return done - first
        self._blocks[done].mix(x, normalised)
        return done + 1 - first

    def _computed(
        self,
        first: int,
        x: torch.Tensor,
        caches: Sequence[DynamicLayer],
        turn: Turn,
        whole: WholeExperts,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return the ids [L, T, K] that routers chose, the norm of the last x, and the number of
        the layer at which it stopped."""
        routing = self._routing
        num_layers = len(caches)
        num_tokens = x.shape[1]
        is_routed = False
        ids = torch.empty(num_layers, num_tokens, routing.top_k, dtype=torch.int64)
        weights = torch.empty(ids.shape, dtype=routing.weights_dtype)
        logits = torch.empty(self._num_experts, dtype=routing.logits_dtype)
        normalised = torch.empty_like(x)
        given = torch.empty_like(x)
        places = tuple(each.data_ptr() for each in (x, normalised, given, logits, weights, ids))
        operands = np.array(
            [CacheRoom.of(layer, num_tokens).operand(layer, num_tokens) for layer in caches]
        )
        while True:
            done, is_absent = self._run(
                tuple(whole), (first, is_routed, num_tokens), places, turn, operands, self._like
            )
            if is_absent or done == num_layers:
                return ids, normalised, done
            _, weights[done], ids[done] = self._routers[done].forward(normalised[0])
            first = done
            is_routed = True


def _kind(block: CompiledBlock, router: CompiledRouter) -> tuple:
    """Return the properties that all layers of one call must share."""
    heads = block.parts.attention.heads
    rotation = block.parts.attention.rotation
    return (
        heads.query.in_features,
        heads.sizes,
        heads.dtype,
        rotation,
        router.routing,
        router.how,
        router.num_experts,
    )


def _is_router_and_experts(layer: MoeLayer, block: CompiledBlock, router: CompiledRouter) -> bool:
    """Return whether the block's mixer gives its own input to its experts, with the router's
    choice, and returns their output."""
    mixer = block.parts.mixer
    seen = []
    dtype = block.parts.attention.heads.dtype
    random = torch.Generator().manual_seed(0)
    tokens, given = torch.randn(2, _NUM_TRIED, 1, router.num_inputs, generator=random).to(dtype)

    def noted(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        seen.append((hidden, ids, weights))
        return given[len(seen) - 1].clone()

    layer.experts.forward = noted
    try:
        with torch.inference_mode():
            outputs = [type(mixer).forward(mixer, token[None]) for token in tokens]
            routed = [layer.gate(token) for token in tokens]
    finally:
        del layer.experts.forward
    wanted = [
        (token, ids, weights) for token, (_, weights, ids) in zip(tokens, routed, strict=True)
    ]
    pairs = [(own, other) for own, other in zip(seen, wanted, strict=False)]
    are_given = len(seen) == len(wanted) and all(
        _are_equal(*each) for pair in pairs for each in zip(*pair, strict=True)
    )
    return are_given and all(
        _are_equal(first_of(out)[0], own) for out, own in zip(outputs, given, strict=True)
    )


def _are_equal(own: torch.Tensor, other: torch.Tensor) -> bool:
    return own.dtype is other.dtype and torch.equal(own, other)
