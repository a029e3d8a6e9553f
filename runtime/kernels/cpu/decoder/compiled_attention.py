"""Attention over a cache of keys and values in compiled code, for one token, and the trial that
finds which attentions of a model it computes, and how."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from runtime.kernels.cpu.decoder.attention_parts import Heads, Rotation, recognise_heads, rotations
from runtime.kernels.cpu.decoder.cache_room import CacheOperand, CacheRoom
from runtime.kernels.cpu.decoder.compiled_norm import Norm, like_of, norm_operand
from runtime.kernels.cpu.decoder.trial import ModuleTrial, run_trials
from runtime.kernels.load import kernels
from runtime.model.open import MoeModel

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a token's position."""

Turn = tuple[int, int, int, int, int]
"""Angles as kernels take them: whether they are float32, the number of rotated pairs, the number of
cosines, and the addresses of cosines and sines."""

_IGNORED = {
    "position_ids",
    "use_cache",
    "cache_position",
    "output_router_logits",
}  # they change nothing for one token
_STILL = (0, 0, 0, 0, 0)  # no angles
_CACHE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
_TRIED_SIZES = {1.0: 1.0, 8.0: 16.0, 64.0: float("inf")}
"""Factors on the output's bound, by the factor on a token's numbers. Large scores leave one
position, and rounding decides which one. Keys and values keep their bound."""


def mask_operand(mask: torch.Tensor | None) -> tuple[int, int]:
    """Return a mask as kernels take it: its address, or 0, and whether it is boolean."""
    return (0, 0) if mask is None else (mask.data_ptr(), int(mask.dtype is torch.bool))


class CompiledAttention:
    """Attention module in compiled code for one token of one request, whose cache has entries. The
    linear layers are called as modules. `layer_index` is the place of its layer in the cache;
    `num_outputs` is the length of the module's output tuple, 0 if it gives a tensor."""

    def __init__(
        self, module: nn.Module, heads: Heads, rotation: Rotation, *, num_outputs: int
    ) -> None:
        self.rotation = rotation
        self.heads = heads
        self._num_outputs = num_outputs
        self._module = module
        self.layer_index = module.layer_idx
        self._theirs = partial(type(module).forward, module)
        self._like = like_of(heads.dtype)
        self._num_keys = heads.count // heads.groups
        self._dtype = heads.dtype
        query_norm, key_norm = heads.norms or (None, None)
        self._prepare_query = self._prepare(heads.count, heads.dim, query_norm)
        self._prepare_key = self._prepare(self._num_keys, heads.dim, key_norm)
        self._place_value = partial(self._prepare(self._num_keys, heads.value_dim, None), _STILL)
        self._attend = partial(
            kernels("cpu.decoder.attention").attend, heads.sizes, heads.scaling, heads.sinks_address
        )

    def _prepare(self, count: int, dim: int, norm: Norm | None) -> Callable[..., None]:
        """Return the kernel that normalises and rotates `count` heads, with its constant arguments
        bound."""
        return partial(
            kernels("cpu.decoder.attention").prepare_heads,
            count,
            dim,
            norm_operand(norm),
            self.rotation.order,
        )

    def forward(self, hidden_states: torch.Tensor, *others: object, **named: object) -> object:
        """Replace the module's forward, which still computes all that this class does not take."""
        if others or self._module._forward_hooks or not self.takes(hidden_states, **named):
            return self._theirs(hidden_states, *others, **named)
        out = self.attend(hidden_states, **named)
        return (out, *[None] * (self._num_outputs - 1)) if self._num_outputs else out

    def takes(
        self,
        x: torch.Tensor,
        past_key_values: object = None,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: Angles | None = None,
        **others: object,
    ) -> bool:
        """Return whether the arguments of a forward are one token after others, in a known cache,
        and no more."""
        heads = self.heads
        past = past_key_values
        if x.numel() != heads.query.in_features or x.dtype is not self._dtype or x.requires_grad:
            return False
        for name, value in others.items():
            if value is not None and value is not False and name not in _IGNORED:
                return False
        if (
            type(past) is not DynamicCache
            or past.offloading
            or len(past.layers) <= self.layer_index
        ):
            return False
        layer = past.layers[self.layer_index]
        if (
            type(layer) not in _CACHE_LAYERS
            or not layer.is_initialized
            or layer.keys.dtype is not self._dtype
        ):
            return False
        num_positions = layer.keys.shape[2] + 1
        return self._is_mask(attention_mask, num_positions) and self._are_angles(
            position_embeddings
        )

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
        is_row = (
            cos.numel() == sin.numel() == cos.shape[-1]
            and cos.is_contiguous()
            and sin.is_contiguous()
        )
        return is_known and is_row and 2 * self._half(cos) <= self.heads.dim

    def _half(self, cos: torch.Tensor) -> int:
        """Return the number of pairs that these cosines rotate."""
        return cos.numel() if self.rotation.is_half else cos.numel() // 2

    def attend(
        self,
        x: torch.Tensor,
        past_key_values: DynamicCache,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: Angles | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Return the output [.., H] for x [.., H]; the mask [1, 1, 1, S] says what the token
        attends to. The token's keys and values are added to the cache's layer."""
        heads = self.heads
        like = self._like
        layer = past_key_values.layers[self.layer_index]
        turn = self.turn(position_embeddings)
        query = heads.query(x)
        at = query.data_ptr()
        self._prepare_query(turn, at, at, heads.dim, like)
        key = heads.key(x)
        value = heads.value(x)
        out = torch.empty(*x.shape[:-1], heads.count * heads.value_dim, dtype=self._dtype)
        if type(layer) is DynamicLayer:
            cache = self._extend(layer, key, value, turn)
        else:
            keys, values = self._updated(layer, key, value, turn)
            cache = (
                keys.data_ptr(),
                keys.stride(1),
                values.data_ptr(),
                values.stride(1),
                keys.shape[2],
            )
        self._attend(at, cache, mask_operand(attention_mask), out.data_ptr(), like)
        return heads.output(out)

    def turn(self, angles: Angles | None) -> Turn:
        """Return the angles of a position as kernels take them."""
        if angles is None or self.rotation.is_still:
            return _STILL
        cos, sin = angles
        return (
            int(cos.dtype is torch.float32),
            self._half(cos),
            cos.numel(),
            cos.data_ptr(),
            sin.data_ptr(),
        )

    def _extend(
        self, layer: DynamicLayer, key: torch.Tensor, value: torch.Tensor, turn: Turn
    ) -> CacheOperand:
        """Write the token's key and value into the room behind the layer's, and return the cache's
        operand."""
        heads = self.heads
        like = self._like
        cache = CacheRoom.of(layer).extend(layer)
        keys, key_step, values, value_step, length = cache
        last = (length - 1) * like.itemsize
        self._prepare_key(turn, key.data_ptr(), keys + last * heads.dim, key_step, like)
        self._place_value(value.data_ptr(), values + last * heads.value_dim, value_step, like)
        return cache

    def _updated(
        self, layer: DynamicLayer, key: torch.Tensor, value: torch.Tensor, turn: Turn
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values [1, N, S, D] with those of the token."""
        heads = self.heads
        source = key.data_ptr()
        shape = (1, self._num_keys, 1)
        self._prepare_key(turn, source, source, heads.dim, self._like)
        keys, values = layer.update(
            key.view(*shape, heads.dim), value.view(*shape, heads.value_dim)
        )
        return keys.contiguous(), values.contiguous()


def compiled_attentions(opened: MoeModel) -> dict[nn.Module, CompiledAttention | str]:
    """Return every attention of the model in compiled code, or the reason why it is not
    compiled."""
    modules = [module for module in opened.model.modules() if _is_attention(module)]
    recognised = {module: recognise_heads(module) for module in modules}
    trials = {
        module: _trial(module, heads)
        for module, heads in recognised.items()
        if isinstance(heads, Heads)
    }
    return recognised | run_trials(opened, trials)


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module has a place in the cache and projects its output."""
    return hasattr(module, "layer_idx") and any(
        hasattr(module, name) for name in ("o_proj", "out_proj")
    )


def _trial(module: nn.Module, heads: Heads) -> ModuleTrial:
    """Return the trial of the ways in which the attention may rotate its heads."""
    make = partial(_candidate, module, heads)
    return ModuleTrial(module, module.layer_idx, list(rotations(heads)), make, _TRIED_SIZES)


def _candidate(
    module: nn.Module, heads: Heads, rotation: Rotation, num_outputs: int
) -> CompiledAttention:
    return CompiledAttention(module, heads, rotation, num_outputs=num_outputs)
