"""Attention of one token over a cache of keys and values, and the first half of a decoder's layer
around it, as compiled code of any device takes their place.

A trial finds what a model's modules do with these parts: modules of other structure compute as
before.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from itertools import permutations
from typing import ClassVar, Protocol

import torch
from torch import nn
from transformers.cache_utils import Cache

from runtime.kernels.decoder.attention_parts import (
    Heads,
    Rotation,
    key_of,
    recognise_heads,
    rotations,
)
from runtime.kernels.decoder.norms import Compiled, Norm
from runtime.kernels.decoder.trial import LayerCopy, ModuleTrial, run_trials
from runtime.model.open import MoeModel

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a token's position."""

_IGNORED = {
    "position_ids",
    "use_cache",
    "cache_position",
    "output_router_logits",
}  # they change nothing for one token
_TRIED_SIZES = {1.0: 1.0, 8.0: 16.0, 64.0: float("inf")}
"""Factors on the output's bound, by the factor on a token's numbers. Large scores leave one
position, and rounding decides which one. Keys and values keep their bound."""
_BLOCK_SIZES = {0.125: 1.0, 1.0: 1.0, 64.0: 1.0}
"""Small numbers show additions to them, large numbers show limits."""


class TokenAttention:
    """Attention module for one token of one request, or up to `most_tokens`, whose cache has
    entries. The linear layers are called as modules. `layer_index` is the place of its layer in the
    cache; `num_outputs` is the length of the module's output tuple, 0 if it gives a tensor."""

    most_tokens: ClassVar[int] = 1

    def __init__(
        self, module: nn.Module, heads: Heads, rotation: Rotation, *, num_outputs: int
    ) -> None:
        self.rotation = rotation
        self.heads = heads
        self.layer_index = module.layer_idx
        self._num_outputs = num_outputs
        self._module = module
        self._theirs = partial(type(module).forward, module)
        self._num_keys = heads.count // heads.groups
        self._dtype = heads.dtype

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
        """Return whether the arguments of a forward are one token after others, or a few, in a
        known cache, and no more."""
        num_tokens = x.shape[:-1].numel()
        if x.shape[-1] != self.heads.query.in_features or not 0 < num_tokens <= self.most_tokens:
            return False
        if x.dtype is not self._dtype or x.requires_grad or num_tokens > 1 and x.shape[0] > 1:
            return False
        for name, value in others.items():
            if value is not None and value is not False and name not in _IGNORED:
                return False
        num_positions = self.num_positions(past_key_values, num_tokens)
        return (
            num_positions is not None
            and self._is_mask(attention_mask, num_tokens, num_positions)
            and self._are_angles(position_embeddings, num_tokens)
        )

    def num_positions(self, past: object, num_tokens: int = 1) -> int | None:
        """Return the number of positions of the cache with the tokens, None for an unknown
        cache."""
        raise NotImplementedError

    def attend(
        self,
        x: torch.Tensor,
        past_key_values: Cache,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: Angles | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Return the output [.., H] for x [.., H]; the mask [1, 1, T, S] says what the tokens
        attend to. The tokens' keys and values are added to the cache's layer."""
        raise NotImplementedError

    def num_pairs(self, cos: torch.Tensor) -> int:
        """Return the number of pairs that a token's cosines rotate."""
        return cos.shape[-1] if self.rotation.is_half else cos.shape[-1] // 2

    def _is_mask(self, mask: torch.Tensor | None, num_tokens: int, num_positions: int) -> bool:
        """Return whether the mask is of this size, and hides from each of several tokens those that
        follow it."""
        if mask is None:
            return num_tokens == 1
        is_known = mask.dtype is torch.bool or mask.dtype is self._dtype
        is_sized = mask.shape[-1] == num_positions and mask.numel() == num_tokens * num_positions
        if not (is_known and is_sized and mask.is_contiguous()):
            return False
        if num_tokens == 1:
            return True
        rows = mask.view(num_tokens, num_positions)[:, -num_tokens:]
        following = rows[torch.ones_like(rows, dtype=torch.bool).triu(1)]
        hidden = (
            ~following if mask.dtype is torch.bool else following <= torch.finfo(mask.dtype).min
        )
        return bool(hidden.all())

    def _are_angles(self, angles: Angles | None, num_tokens: int) -> bool:
        if angles is None or self.rotation.is_still:
            return True
        cos, sin = angles
        is_known = cos.dtype is sin.dtype and cos.dtype in (self._dtype, torch.float32)
        is_row = (
            cos.numel() == sin.numel() == num_tokens * cos.shape[-1]
            and cos.is_contiguous()
            and sin.is_contiguous()
        )
        return is_known and is_row and 2 * self.num_pairs(cos) <= self.heads.dim


class MakesAttention(Protocol):
    """Makes the candidate of one rotation."""

    def __call__(
        self, module: nn.Module, heads: Heads, rotation: Rotation, *, num_outputs: int
    ) -> TokenAttention: ...


def compiled_attentions(
    opened: MoeModel, compiled: Compiled, make: MakesAttention, copy_layer: LayerCopy
) -> dict[nn.Module, TokenAttention | str]:
    """Return every attention of the model in compiled code, or the reason why it is not
    compiled. `copy_layer` is as in `ModuleTrial`."""
    modules = [module for module in opened.model.modules() if _is_attention(module)]
    recognised = {module: recognise_heads(module, compiled) for module in modules}
    trials = {
        module: _trial(module, heads, make, copy_layer)
        for module, heads in recognised.items()
        if isinstance(heads, Heads)
    }
    return recognised | run_trials(opened, trials)


def told(attentions: Mapping[nn.Module, TokenAttention | str]) -> dict[str, object]:
    """Return how many attentions are compiled, and, by class, why others are not."""
    left = Counter(
        f"{type(module).__name__}: {reason}"
        for module, reason in attentions.items()
        if isinstance(reason, str)
    )
    return {"attentions": len(attentions) - left.total(), "attentions_left": dict(left)}


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module has a place in the cache and projects its output."""
    return hasattr(module, "layer_idx") and any(
        hasattr(module, name) for name in ("o_proj", "out_proj")
    )


def _trial(
    module: nn.Module, heads: Heads, make: MakesAttention, copy_layer: LayerCopy
) -> ModuleTrial:
    """Return the trial of the ways in which the attention may rotate its heads."""

    def candidate(rotation: Rotation, num_outputs: int) -> TokenAttention:
        return make(module, heads, rotation, num_outputs=num_outputs)

    def key(rotation: Rotation, x: torch.Tensor, named: dict[str, object]) -> torch.Tensor:
        return key_of(heads, rotation, x, named.get("position_embeddings"))

    ways = list(rotations(heads))
    return ModuleTrial(module, module.layer_idx, ways, candidate, _TRIED_SIZES, copy_layer, key)


@dataclass(frozen=True, slots=True)
class BlockParts:
    """Attention of a layer, the norms before it and behind the sum with it, and the module that
    takes the latter norm's output. `modules` have forwards that one call computes."""

    attention: TokenAttention
    before: Norm
    behind: Norm
    mixer: nn.Module
    modules: tuple[nn.Module, ...]

    @property
    def norms(self) -> tuple[Norm | None, ...]:
        """Norms before attention, of queries, of keys, and behind attention."""
        return self.before, *(self.attention.heads.norms or (None, None)), self.behind


class TokenBlock:
    """Layer of a decoder for one token: x plus attention of its norm, plus the mixer, an MLP or
    experts, of that sum's norm. The mixer is called as a module."""

    def __init__(self, module: nn.Module, parts: BlockParts, *, num_outputs: int) -> None:
        self.module = module
        self.parts = parts
        self.linear = parts.attention.heads.linear
        self._theirs = partial(type(module).forward, module)
        self._attention = parts.attention
        self._gives_tensor = not num_outputs
        self._hooks = [
            hooks for own in parts.modules for hooks in (own._forward_hooks, own._forward_pre_hooks)
        ]

    def forward(self, hidden_states: torch.Tensor, *others: object, **named: object) -> object:
        """Replace the layer's forward, which still computes all that this class does not take."""
        if others or any(self._hooks) or not self.takes(hidden_states, **named):
            return self._theirs(hidden_states, *others, **named)
        return self.attend(hidden_states, **named)

    def takes(self, x: torch.Tensor, **named: object) -> bool:
        """Return whether the arguments are one token after others, in a cache that the attention
        knows."""
        return self._gives_tensor and x.is_contiguous() and self._attention.takes(x, **named)

    def attend(self, x: torch.Tensor, **named: object) -> torch.Tensor:
        """Return the layer's output [.., H] for x [.., H]. The token's keys and values are added to
        the cache's layer."""
        raise NotImplementedError

    def mix(self, x: torch.Tensor, normalised: torch.Tensor) -> torch.Tensor:
        """Add the mixer's output for the norm of x to x, in place."""
        return x.add_(first_of(self.parts.mixer(normalised)))


class MakesBlock(Protocol):
    """Makes the candidate of one way to take a layer's children."""

    def __call__(self, module: nn.Module, parts: BlockParts, *, num_outputs: int) -> TokenBlock: ...


def compiled_blocks(
    opened: MoeModel,
    attentions: Mapping[nn.Module, TokenAttention | str],
    norms: Mapping[nn.Module, Norm | None],
    make: MakesBlock,
    copy_layer: LayerCopy,
) -> dict[nn.Module, TokenBlock]:
    """Return the compiled layers, by module, that agree with the modules."""
    found = {
        module: list(_recognised(module, attentions, norms)) for module in opened.model.modules()
    }
    trials = {
        module: _block_trial(module, parts, make, copy_layer)
        for module, parts in found.items()
        if parts
    }
    return {
        module: block
        for module, block in run_trials(opened, trials).items()
        if isinstance(block, TokenBlock)
    }


def _recognised(
    module: nn.Module,
    attentions: Mapping[nn.Module, TokenAttention | str],
    norms: Mapping[nn.Module, Norm | None],
) -> Iterator[BlockParts]:
    """Yield the ways to take a layer's children as the parts of a block."""
    children = list(module.children())
    own = [child for child in children if isinstance(attentions.get(child), TokenAttention)]
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


def _block_trial(
    module: nn.Module, ways: list[BlockParts], make: MakesBlock, copy_layer: LayerCopy
) -> ModuleTrial:
    def candidate(way: int, num_outputs: int) -> TokenBlock:
        return make(module, ways[way], num_outputs=num_outputs)

    index = ways[0].attention.layer_index
    return ModuleTrial(module, index, list(range(len(ways))), candidate, _BLOCK_SIZES, copy_layer)


def first_of(output: torch.Tensor | tuple) -> torch.Tensor:
    """Return a module's output, or the first of several."""
    return output[0] if isinstance(output, tuple) else output
