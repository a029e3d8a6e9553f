"""Attention over a cache of keys and values in compiled code, for one token."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from runtime.kernels.cpu.attention_parts import Heads, Rotation
from runtime.kernels.cpu.cache_room import CacheRoom
from runtime.kernels.cpu.compiled_norm import Norm, like_of
from runtime.kernels.load import kernels

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a token's position."""

_IGNORED = {"position_ids", "use_cache", "cache_position", "output_router_logits"}  # they change nothing for one token
_STILL = (False, 0, 0, 0, 0)  # no angles
_CACHE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


class CompiledAttention:
    """Computes what an attention module does for one token of one request, the cache of which has entries. The linear
    layers are called as modules. `num_outputs`: of the module's tuple, 0 if it gives a tensor."""

    def __init__(self, module: nn.Module, heads: Heads, rotation: Rotation, *, num_outputs: int) -> None:
        self.rotation, self._heads, self._num_outputs = rotation, heads, num_outputs
        self._module, self._theirs = module, partial(type(module).forward, module)
        self._like, self._num_keys, self._dtype = like_of(heads.dtype), heads.count // heads.groups, heads.dtype
        query_norm, key_norm = heads.norms or (None, None)
        self._prepare_query = self._prepare(heads.count, heads.dim, query_norm)
        self._prepare_key = self._prepare(self._num_keys, heads.dim, key_norm)
        self._place_value = partial(self._prepare(self._num_keys, heads.value_dim, None), *_STILL)
        sinks = 0 if heads.sinks is None else heads.sinks.data_ptr()
        sizes = (heads.count, heads.groups, heads.dim, heads.value_dim)
        self._attend = partial(kernels("cpu.attention").attend, *sizes, heads.scaling, sinks)

    def _prepare(self, count: int, dim: int, norm: Norm | None) -> Callable[..., None]:
        """The kernel that normalises and rotates `count` heads, without the arguments that change."""
        rotation, given = self.rotation, (0, 0, 0.0, False)
        if norm is not None:
            given = (len(norm.weight), norm.weight.data_ptr(), norm.eps, norm.is_rounded)
        order = (rotation.is_late, rotation.is_paired, rotation.is_each, rotation.is_wide)
        return partial(kernels("cpu.attention").prepare_heads, count, dim, *given, *order)

    def forward(self, hidden_states: torch.Tensor, *others: object, **named: object) -> object:
        """The replacement of the module's forward, which computes all that this class does not take."""
        if others or self._module._forward_hooks or not self.takes(hidden_states, **named):
            return self._theirs(hidden_states, *others, **named)
        layer = named["past_key_values"].layers[self._module.layer_idx]
        out = self.attend(hidden_states, named.get("position_embeddings"), named.get("attention_mask"), layer)
        return (out, *[None] * (self._num_outputs - 1)) if self._num_outputs else out

    def takes(
        self,
        x: torch.Tensor,
        past_key_values: object = None,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: Angles | None = None,
        **others: object,
    ) -> bool:
        """Whether the arguments of a forward are one token after others, in a cache that is known, and no more."""
        heads, past, index = self._heads, past_key_values, self._module.layer_idx
        if x.numel() != heads.query.in_features or x.dtype is not self._dtype or x.requires_grad:
            return False
        if any(value is not None and value is not False for name, value in others.items() if name not in _IGNORED):
            return False
        if type(past) is not DynamicCache or past.offloading or len(past.layers) <= index:
            return False
        layer = past.layers[index]
        if type(layer) not in _CACHE_LAYERS or not layer.is_initialized or layer.keys.dtype is not self._dtype:
            return False
        num_positions = layer.keys.shape[2] + 1
        return self._is_mask(attention_mask, num_positions) and self._are_angles(position_embeddings)

    def _is_mask(self, mask: torch.Tensor | None, num_positions: int) -> bool:
        if mask is None:
            return True
        is_known = mask.dtype is torch.bool or mask.dtype is self._dtype
        return is_known and mask.numel() == mask.shape[-1] == num_positions and mask.is_contiguous()

    def _are_angles(self, angles: Angles | None) -> bool:
        if angles is None or self.rotation.is_still:
            return True
        cos, sin = angles
        is_known = cos.dtype is sin.dtype and cos.dtype in (self._dtype, torch.float32)
        is_row = cos.numel() == sin.numel() == cos.shape[-1] and cos.is_contiguous() and sin.is_contiguous()
        return is_known and is_row and 2 * self._half(cos) <= self._heads.dim

    def _half(self, cos: torch.Tensor) -> int:
        """The number of pairs that are rotated by these cosines."""
        return cos.numel() if self.rotation.is_half else cos.numel() // 2

    def attend(
        self, x: torch.Tensor, angles: Angles | None, mask: torch.Tensor | None, layer: DynamicLayer
    ) -> torch.Tensor:
        """Compute the output [.., H] for x [.., H]; mask [1, 1, 1, S] of what the token attends to. The cache's layer
        gets the token's keys and values."""
        heads, like = self._heads, self._like
        turn = self._turn(angles)
        query = heads.query(x)
        at = query.data_ptr()
        self._prepare_query(*turn, at, at, heads.dim, like)
        keys, values = self._extended(layer, heads.key(x), heads.value(x), turn)
        out = torch.empty(*x.shape[:-1], heads.count * heads.value_dim, dtype=self._dtype)
        cache = (keys.data_ptr(), keys.stride(1), values.data_ptr(), values.stride(1), keys.shape[2])
        masked = (0, False) if mask is None else (mask.data_ptr(), mask.dtype is torch.bool)
        self._attend(at, *cache, *masked, out.data_ptr(), like)
        return heads.output(out)

    def _turn(self, angles: Angles | None) -> tuple[bool, int, int, int, int]:
        if angles is None or self.rotation.is_still:
            return _STILL
        cos, sin = angles
        return cos.dtype is torch.float32, self._half(cos), cos.numel(), cos.data_ptr(), sin.data_ptr()

    def _extended(
        self, layer: DynamicLayer, key: torch.Tensor, value: torch.Tensor, turn: tuple
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, N, S, D] with those of the token."""
        heads, like, source = self._heads, self._like, key.data_ptr()
        if type(layer) is DynamicLayer:
            room = CacheRoom.of(layer)
            key_at, value_at = room.extend(layer)
            self._prepare_key(*turn, source, key_at, room.steps[0], like)
            self._place_value(value.data_ptr(), value_at, room.steps[1], like)
            return layer.keys, layer.values
        self._prepare_key(*turn, source, source, heads.dim, like)
        shape = (1, self._num_keys, 1)
        keys, values = layer.update(key.view(*shape, heads.dim), value.view(*shape, heads.value_dim))
        return keys.contiguous(), values.contiguous()
