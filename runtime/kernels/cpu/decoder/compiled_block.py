"""First half of a decoder's layer, up to the norm before its MLP or experts, in one compiled call
for one token.

A trial finds what a layer does with these parts: modules of other structure compute as before.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from itertools import permutations

import torch
from torch import nn
from transformers.cache_utils import DynamicLayer

from runtime.kernels.cpu.decoder.cache_room import CacheRoom
from runtime.kernels.cpu.decoder.compiled_attention import CompiledAttention, mask_operand
from runtime.kernels.cpu.decoder.compiled_norm import Norm, like_of, norm_operand
from runtime.kernels.cpu.decoder.trial import ModuleTrial, run_trials
from runtime.kernels.cpu.dense import linear_operand
from runtime.kernels.load import kernels
from runtime.model.open import MoeModel

_SIZES = {0.125: 1.0, 1.0: 1.0, 64.0: 1.0}
"""Small numbers show additions to them, large numbers show limits."""


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
            kernels("cpu.decoder.block").attend_block,
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
    trials = {module: _trial(module, parts) for module, parts in found.items() if parts}
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


def _trial(module: nn.Module, ways: list[BlockParts]) -> ModuleTrial:
    def make(way: int, num_outputs: int) -> CompiledBlock:
        return CompiledBlock(module, ways[way], num_outputs=num_outputs)

    return ModuleTrial(module, ways[0].attention.layer_index, list(range(len(ways))), make, _SIZES)


def first_of(output: torch.Tensor | tuple) -> torch.Tensor:
    """Return a module's output, or the first of several."""
    return output[0] if isinstance(output, tuple) else output
