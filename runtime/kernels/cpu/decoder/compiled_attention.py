"""Attention of one token, or of a few of one sequence, in compiled code, alone or in one call with
the norms around it."""

import copy
from collections.abc import Callable, Mapping
from functools import cached_property, partial

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from runtime.kernels.cpu.decoder.compiled_norm import NUMBA, like_of, norm_operand
from runtime.kernels.cpu.dense import MOST_TOKENS, linear_operand
from runtime.kernels.decoder import attention
from runtime.kernels.decoder.attention import Angles, BlockParts, TokenAttention, TokenBlock
from runtime.kernels.decoder.attention_parts import Heads, Rotation
from runtime.kernels.decoder.norms import Norm
from runtime.kernels.decoder.trial import layer_of
from runtime.kernels.load import kernels
from runtime.model.open import MoeModel

Turn = tuple[int, int, int, int, int]
"""Angles as kernels take them: whether they are float32, the number of rotated pairs, the number of
cosines, and the addresses of cosines and sines."""

CacheOperand = tuple[int, int, int, int, int]
"""A cache as kernels take it: the address of the first head's keys, the distance between heads in
numbers, the same two for its values, and the number of positions."""

_NAME = "moectl_room"
_LEAST = 64  # positions
_STILL = (0, 0, 0, 0, 0)  # no angles


class CacheRoom:
    """Memory [1, N, C, D] whose first positions are the layer's keys and values [1, N, S, D].

    It is used as long as the layer has the very tensors that were given to it last. If the layer is
    cropped, or a copy of it goes on from the same tensors, it gets new room.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._capacity = keys.shape[2] + max(_LEAST, keys.shape[2] // 4)
        self._buffers = tuple(self._with_room(cached) for cached in (keys, values))
        self._given = (keys, values)
        self._places = tuple(
            place for buffer in self._buffers for place in (buffer.data_ptr(), buffer.stride(1))
        )

    def _with_room(self, cached: torch.Tensor) -> torch.Tensor:
        batch, heads, num_positions, dim = cached.shape
        buffer = torch.empty(batch, heads, self._capacity, dim, dtype=cached.dtype)
        buffer.narrow(2, 0, num_positions).copy_(cached)
        return buffer

    def __deepcopy__(self, _: dict) -> None:
        """Return None: a copied layer gets new room, because the addresses here are of this layer's
        memory."""

    @classmethod
    def of(cls, layer: DynamicLayer, count: int = 1) -> "CacheRoom":
        """Return the room of this layer, with space for `count` more positions, fewer than
        `_LEAST`."""
        room = vars(layer).get(_NAME)
        if room is not None:
            keys, values = room._given
            is_same = layer.keys is keys and layer.values is values
            if is_same and keys.shape[2] + count <= room._capacity:
                return room
        room = cls(layer.keys, layer.values)
        setattr(layer, _NAME, room)
        return room

    def extend(self, layer: DynamicLayer, count: int = 1) -> CacheOperand:
        """Give the layer `count` more positions, whose numbers are to be written, and return the
        operand."""
        operand = self.operand(layer, count)
        keys, values = self._buffers
        layer.keys = keys.narrow(2, 0, operand[-1])
        layer.values = values.narrow(2, 0, operand[-1])
        self._given = (layer.keys, layer.values)
        return operand

    def operand(self, layer: DynamicLayer, count: int = 1) -> CacheOperand:
        """Return the operand with which kernels write the numbers of the positions that `extend`
        will add."""
        return *self._places, layer.keys.shape[2] + count


def mask_operand(mask: torch.Tensor | None) -> tuple[int, int]:
    """Return a mask as kernels take it: its address, or 0, and whether it is boolean."""
    return (0, 0) if mask is None else (mask.data_ptr(), int(mask.dtype is torch.bool))


class CompiledAttention(TokenAttention):
    """Attention module in compiled code for a cache that grows."""

    most_tokens = MOST_TOKENS

    def __init__(
        self, module: nn.Module, heads: Heads, rotation: Rotation, *, num_outputs: int
    ) -> None:
        super().__init__(module, heads, rotation, num_outputs=num_outputs)
        self._like = like_of(heads.dtype)
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

    def num_positions(self, past: object, num_tokens: int = 1) -> int | None:
        layer = layer_of(past, self.layer_index)
        if layer is None or layer.keys.dtype is not self._dtype:
            return None
        if num_tokens > 1 and type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return None
        return layer.keys.shape[2] + num_tokens

    def attend(
        self,
        x: torch.Tensor,
        past_key_values: DynamicCache,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: Angles | None = None,
        **_: object,
    ) -> torch.Tensor:
        heads = self.heads
        like = self._like
        layer = past_key_values.layers[self.layer_index]
        if x.shape[:-1].numel() > 1:
            return self._attend_all(x, layer, attention_mask, position_embeddings)
        turn = self.turn(position_embeddings)
        query = heads.query(x)
        at = query.data_ptr()
        self._prepare_query(turn, at, at, heads.dim, like)
        key = heads.key(x)
        value = heads.value(x)
        out = torch.empty(*x.shape[:-1], heads.count * heads.value_dim, dtype=self._dtype)
        cache, _held = self._with_token(layer, key, value, turn)
        self._attend(at, cache, mask_operand(attention_mask), out.data_ptr(), like)
        return heads.output(out)

    def _attend_all(
        self, x: torch.Tensor, layer: DynamicLayer, mask: torch.Tensor, angles: Angles | None
    ) -> torch.Tensor:
        """Return the output for the tokens x [1, T, H] of one sequence."""
        heads = self.heads
        like = self._like
        query, key, value = (project(x)[0] for project in heads.linear[:3])
        out = torch.empty(*x.shape[:-1], heads.count * heads.value_dim, dtype=self._dtype)
        for t in range(len(query)):
            at = query[t].data_ptr()
            turn = self.turn(angles, t)
            self._prepare_query(turn, at, at, heads.dim, like)
            cache, _held = self._with_token(layer, key[t], value[t], turn)
            after = mask.shape[-1] - len(query) + t + 1
            row = mask[..., t, after - cache[-1] : after]  # a window moves with each token
            self._attend(at, cache, mask_operand(row), out[0, t].data_ptr(), like)
        return heads.output(out)

    def turn(self, angles: Angles | None, token: int = 0) -> Turn:
        """Return the angles of a position as kernels take them: of the first token, whose angles
        those of the others follow, or of another."""
        if angles is None or self.rotation.is_still:
            return _STILL
        cos, sin = angles
        count = cos.shape[-1]
        behind = token * count * cos.itemsize
        return (
            int(cos.dtype is torch.float32),
            self.num_pairs(cos),
            count,
            cos.data_ptr() + behind,
            sin.data_ptr() + behind,
        )

    def _with_token(
        self, layer: DynamicLayer, key: torch.Tensor, value: torch.Tensor, turn: Turn
    ) -> tuple[CacheOperand, tuple[torch.Tensor, ...]]:
        """Add the token's key and value to the layer. Returns the operand of what the token attends
        to, and the tensors in which that lies."""
        if type(layer) is DynamicLayer:
            return self._extend(layer, key, value, turn), ()
        keys, values = self._updated(layer, key, value, turn)
        places = keys.data_ptr(), keys.stride(1), values.data_ptr(), values.stride(1)
        return (*places, keys.shape[2]), (keys, values)

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
    return attention.compiled_attentions(opened, NUMBA, CompiledAttention, copy.deepcopy)


class CompiledBlock(TokenBlock):
    """Layer of a decoder whose attention is one call with the norms around it."""

    def __init__(self, module: nn.Module, parts: BlockParts, *, num_outputs: int) -> None:
        super().__init__(module, parts, num_outputs=num_outputs)
        self._like = like_of(parts.attention.heads.dtype)

    @cached_property
    def _run(self) -> Callable[..., None]:
        """The kernel, on the layers as they are at its first call."""
        heads = self.parts.attention.heads
        return partial(
            kernels("cpu.decoder.block").attend_block.of(self._like),
            heads.query.in_features,
            heads.sizes,
            tuple(map(linear_operand, heads.linear)),
            tuple(map(norm_operand, self.parts.norms)),
            self.parts.attention.rotation.order,
            heads.scaling,
            heads.sinks_address,
        )

    def takes(self, x: torch.Tensor, **named: object) -> bool:
        """Return whether the arguments are a few tokens after others, in a cache that grows."""
        if not super().takes(x, **named):
            return False
        layer = named["past_key_values"].layers[self._attention.layer_index]
        return type(layer) is DynamicLayer

    def attend(
        self,
        x: torch.Tensor,
        past_key_values: object,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: Angles | None = None,
        **_: object,
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        normalised = torch.empty_like(x)
        layer = past_key_values.layers[self._attention.layer_index]
        count = x.shape[:-1].numel()
        cache = CacheRoom.of(layer, count).extend(layer, count)
        turn = self._attention.turn(position_embeddings)
        places = out.data_ptr(), normalised.data_ptr()
        mask = mask_operand(attention_mask)
        self._run(count, x.data_ptr(), turn, cache, mask, *places, self._like)
        return self.mix(out, normalised)


def compiled_blocks(
    opened: MoeModel,
    attentions: Mapping[nn.Module, TokenAttention | str],
    norms: Mapping[nn.Module, Norm | None],
) -> dict[nn.Module, CompiledBlock]:
    """Return the compiled layers, by module, that agree with the modules."""
    return attention.compiled_blocks(opened, attentions, norms, CompiledBlock, copy.deepcopy)
