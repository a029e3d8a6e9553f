"""The first half of a decoder's layer in compiled code, for one token: its attention over a cache
of keys and values, alone or in one call with the norms around it.

A trial finds what a model's modules do with these parts: modules of other structure compute as
before.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from itertools import permutations

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from runtime.kernels.cpu.decoder.attention_parts import Heads, Rotation, recognise_heads, rotations
from runtime.kernels.cpu.decoder.compiled_norm import Norm, like_of, norm_operand
from runtime.kernels.cpu.decoder.trial import ModuleTrial, run_trials
from runtime.kernels.cpu.dense import linear_operand
from runtime.kernels.load import kernels
from runtime.model.open import MoeModel

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a token's position."""

Turn = tuple[int, int, int, int, int]
"""Angles as kernels take them: whether they are float32, the number of rotated pairs, the number of
cosines, and the addresses of cosines and sines."""

CacheOperand = tuple[int, int, int, int, int]
"""A cache as kernels take it: the address of the first head's keys, the distance between heads in
numbers, the same two for its values, and the number of positions."""

_NAME = "moectl_room"
_LEAST = 64  # positions
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
_BLOCK_SIZES = {0.125: 1.0, 1.0: 1.0, 64.0: 1.0}
"""Small numbers show additions to them, large numbers show limits."""


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
    def of(cls, layer: DynamicLayer) -> "CacheRoom":
        """Return the room of this layer, with space for one more position."""
        room = vars(layer).get(_NAME)
        if room is not None:
            keys, values = room._given
            is_same = layer.keys is keys and layer.values is values
            if is_same and keys.shape[2] < room._capacity:
                return room
        room = cls(layer.keys, layer.values)
        setattr(layer, _NAME, room)
        return room

    def extend(self, layer: DynamicLayer) -> CacheOperand:
        """Give the layer one more position, whose numbers are to be written, and return the
        operand."""
        operand = self.operand(layer)
        keys, values = self._buffers
        layer.keys = keys.narrow(2, 0, operand[-1])
        layer.values = values.narrow(2, 0, operand[-1])
        self._given = (layer.keys, layer.values)
        return operand

    def operand(self, layer: DynamicLayer) -> CacheOperand:
        """Return the operand with which kernels write the numbers of the position that `extend`
        will add."""
        return *self._places, layer.keys.shape[2] + 1


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


@dataclass(frozen=True, slots=True)
class BlockParts:
    """Attention of a layer, the norms before it and behind the sum with it, and the module that
    takes the latter norm's output. `modules` have forwards that one call computes."""

    attention: CompiledAttention
    before: Norm
    behind: Norm
    mixer: nn.Module
    modules: tuple[nn.Module, ...]

    @property
    def norms(self) -> tuple[Norm | None, ...]:
        """Norms before attention, of queries, of keys, and behind attention."""
        return self.before, *(self.attention.heads.norms or (None, None)), self.behind


class CompiledBlock:
    """Layer of a decoder for one token: x plus attention of its norm, plus the mixer, an MLP or
    experts, of that sum's norm. The mixer is called as a module."""

    def __init__(self, module: nn.Module, parts: BlockParts, *, num_outputs: int) -> None:
        attention = parts.attention
        heads = parts.attention.heads
        self.module = module
        self.parts = parts
        self.linear = heads.linear
        self._theirs = partial(type(module).forward, module)
        self._attention = attention
        self._gives_tensor = not num_outputs
        self._hooks = [
            hooks for own in parts.modules for hooks in (own._forward_hooks, own._forward_pre_hooks)
        ]
        self._like = like_of(heads.dtype)
        self._run = partial(
            kernels("cpu.decoder.block").attend_block.of(self._like),
            heads.query.in_features,
            heads.sizes,
            tuple(map(linear_operand, heads.linear)),
            tuple(map(norm_operand, parts.norms)),
            attention.rotation.order,
            heads.scaling,
            heads.sinks_address,
        )

    def forward(self, hidden_states: torch.Tensor, *others: object, **named: object) -> object:
        """Replace the layer's forward, which still computes all that this class does not take."""
        if others or any(self._hooks) or not self.takes(hidden_states, **named):
            return self._theirs(hidden_states, *others, **named)
        return self.attend(hidden_states, **named)

    def takes(self, x: torch.Tensor, **named: object) -> bool:
        """Return whether the arguments are one token after others, in a cache that grows."""
        if not (self._gives_tensor and x.is_contiguous() and self._attention.takes(x, **named)):
            return False
        layer = named["past_key_values"].layers[self._attention.layer_index]
        return type(layer) is DynamicLayer

    def attend(
        self,
        x: torch.Tensor,
        past_key_values: object,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Return the layer's output [.., H] for x [.., H]. The token's keys and values are added to
        the cache's layer."""
        out = torch.empty_like(x)
        normalised = torch.empty_like(x)
        layer = past_key_values.layers[self._attention.layer_index]
        cache = CacheRoom.of(layer).extend(layer)
        turn = self._attention.turn(position_embeddings)
        places = out.data_ptr(), normalised.data_ptr()
        self._run(x.data_ptr(), turn, cache, mask_operand(attention_mask), *places, self._like)
        return self.mix(out, normalised)

    def mix(self, x: torch.Tensor, normalised: torch.Tensor) -> torch.Tensor:
        """Add the mixer's output for the norm of x to x, in place."""
        return x.add_(first_of(self.parts.mixer(normalised)))


def compiled_blocks(
    opened: MoeModel,
    attentions: Mapping[nn.Module, CompiledAttention | str],
    norms: Mapping[nn.Module, Norm],
) -> dict[nn.Module, CompiledBlock]:
    """Return the compiled layers, by module, that agree with the modules."""
    found = {
        module: list(_recognised(module, attentions, norms)) for module in opened.model.modules()
    }
    trials = {module: _block_trial(module, parts) for module, parts in found.items() if parts}
    return {
        module: block
        for module, block in run_trials(opened, trials).items()
        if isinstance(block, CompiledBlock)
    }


def _recognised(
    module: nn.Module,
    attentions: Mapping[nn.Module, CompiledAttention | str],
    norms: Mapping[nn.Module, Norm],
) -> Iterator[BlockParts]:
    """Yield the ways to take a layer's children as the parts of a block."""
    children = list(module.children())
    own = [child for child in children if isinstance(attentions.get(child), CompiledAttention)]
    own_norms = [child for child in children if norms.get(child)]
    mixers = [child for child in children if child not in own and child not in own_norms]
    if (len(own), len(own_norms), len(mixers)) != (1, 2, 1) or not _takes_one(mixers[0]):
        return
    attention = attentions[own[0]]
    if any(len(norms[child].weight) != attention.heads.query.in_features for child in own_norms):
        return
    modules = (*own[0].modules(), *own_norms)
    for before, behind in permutations(own_norms):
        yield BlockParts(attention, norms[before], norms[behind], mixers[0], modules)


def _takes_one(module: nn.Module) -> bool:
    """Return whether a module needs a single argument."""
    parameters = list(signature(type(module).forward).parameters.values())[1:]
    kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return (
        sum(each.default is Parameter.empty and each.kind not in kinds for each in parameters) == 1
    )


def _block_trial(module: nn.Module, ways: list[BlockParts]) -> ModuleTrial:
    def make(way: int, num_outputs: int) -> CompiledBlock:
        return CompiledBlock(module, ways[way], num_outputs=num_outputs)

    return ModuleTrial(
        module, ways[0].attention.layer_index, list(range(len(ways))), make, _BLOCK_SIZES
    )


def first_of(output: torch.Tensor | tuple) -> torch.Tensor:
    """Return a module's output, or the first of several."""
    return output[0] if isinstance(output, tuple) else output
