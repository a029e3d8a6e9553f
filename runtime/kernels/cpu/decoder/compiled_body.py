"""Decoder from its embedding to its last norm for a few tokens, module after module, without the
preparations of its own code for any input: masks, recorded outputs, defaults."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from runtime.kernels.cpu.decoder.compiled_layers import CompiledLayers
from runtime.kernels.cpu.dense import MOST_TOKENS
from runtime.kernels.decoder.norms import Norm
from runtime.kernels.decoder.trial import run_trials
from runtime.model.open import MoeModel
from runtime.model.quantised.quantised_linear import QuantisedEmbedding

_RECORDED = (
    "output_hidden_states",
    "output_attentions",
    "output_router_logits",
)  # flags of a config

LAST = -1
"""Value of `output_hidden_states` that asks for the states of the last layer only."""


@dataclass(frozen=True, slots=True)
class BodyParts:
    """Children of a decoder, which has no others."""

    embedding: nn.Embedding | QuantisedEmbedding
    rotary: nn.Module
    layers: nn.ModuleList
    norm: nn.Module


class CompiledBody:
    """Decoder whose modules are called for a few tokens after others, or whose `layers` are
    computed in one call. `kind` is the class of its output."""

    def __init__(self, module: nn.Module, parts: BodyParts, kind: type | None) -> None:
        self._module = module
        self.parts = parts
        self._kind = kind
        self.layers: CompiledLayers | None = None
        self._theirs = partial(type(module).forward, module)

    def forward(self, *arguments: object, **named: object) -> object:
        """Replace the module's forward, which still computes all that this class does not take."""
        if arguments or not self.takes(**named):
            return self._theirs(*arguments, **named)
        last = self.run(**named)
        asked = {"hidden_states": (last,)} if named.get("output_hidden_states") == LAST else {}
        return self._kind(last_hidden_state=last, past_key_values=named["past_key_values"], **asked)

    def takes(
        self,
        input_ids: torch.Tensor | None = None,
        past_key_values: object = None,
        attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        position_ids: torch.Tensor | None = None,
        output_hidden_states: object = None,
        **others: object,
    ) -> bool:
        """Return whether the arguments are a few tokens of one request, which attend to all before
        them in a cache that grows."""
        past = past_key_values
        config = self._module.config
        if input_ids is None or input_ids.dim() != 2 or len(input_ids) != 1 or not use_cache:
            return False
        num_tokens = input_ids.shape[1]
        if not 0 < num_tokens <= MOST_TOKENS:
            return False
        if (
            type(past) is not DynamicCache
            or past.offloading
            or len(past.layers) != len(self.parts.layers)
        ):
            return False
        for layer in past.layers:
            if type(layer) is not DynamicLayer or not layer.is_initialized:
                return False
        if output_hidden_states != LAST:
            others["output_hidden_states"] = output_hidden_states
        for value in others.values():
            if value is not None and value is not False:
                return False
        for flag in _RECORDED:
            if getattr(config, flag, False):
                return False
        if not config.return_dict:
            return False
        num_positions = past.layers[0].keys.shape[2] + num_tokens
        is_all = (
            attention_mask is None
            or attention_mask.shape == (1, num_positions)
            and bool(attention_mask.all())
        )
        return is_all and (position_ids is None or position_ids.shape == (1, num_tokens))

    def run(
        self,
        input_ids: torch.Tensor,
        past_key_values: DynamicCache,
        position_ids: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Return the output of the last norm, [1, T, H]."""
        # The embedding's output is cloned because layers write to it.
        parts = self.parts
        x = self.parts.embedding(input_ids).clone()
        num_tokens = input_ids.shape[1]
        num_before = past_key_values.layers[0].keys.shape[2]
        if position_ids is None:
            position_ids = torch.arange(num_before, num_before + num_tokens)[None]
        angles = parts.rotary(x, position_ids)
        named = {
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "position_embeddings": angles,
        }
        mask = _causal(num_before, num_tokens, x.dtype) if num_tokens > 1 else None
        done = 0
        whole = self.layers if self.layers and self.layers.experts else None
        while done < len(parts.layers):
            if whole and (computed := whole.run(done, x, past_key_values, mask, angles)):
                done += computed
            else:
                x = parts.layers[done](x, attention_mask=mask, use_cache=True, **named)
                done += 1
        return parts.norm(x)


def _causal(num_before: int, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask [1, 1, T, S] of tokens that each attend to all up to itself."""
    least = torch.finfo(dtype).min
    shape = (1, 1, num_tokens, num_before + num_tokens)
    return torch.full(shape, least, dtype=dtype).triu(num_before + 1)


def compiled_bodies(
    opened: MoeModel, norms: Mapping[nn.Module, Norm | None]
) -> dict[nn.Module, CompiledBody]:
    """Return the decoders whose modules, called one after another, give the bits of their own
    code."""
    found = {module: _parts(module, norms) for module in opened.model.modules()}
    trials = {module: _Trial(module, parts) for module, parts in found.items() if parts}
    return {
        module: body
        for module, body in run_trials(opened, trials).items()
        if isinstance(body, CompiledBody)
    }


def _parts(module: nn.Module, norms: Mapping[nn.Module, Norm | None]) -> BodyParts | None:
    children = list(module.children())
    kinds = [
        [child for child in children if isinstance(child, nn.Embedding | QuantisedEmbedding)],
        [child for child in children if hasattr(child, "inv_freq")],
        [child for child in children if isinstance(child, nn.ModuleList)],
        [child for child in children if norms.get(child)],
    ]
    is_whole = len(children) == len(kinds) and all(len(own) == 1 for own in kinds)
    return BodyParts(*(own[0] for own in kinds)) if is_whole and hasattr(module, "config") else None


class _Trial:
    """Comparison of a decoder's output and cache with those of its modules, called one after
    another."""

    def __init__(self, module: nn.Module, parts: BodyParts) -> None:
        self._theirs = partial(type(module).forward, module)
        self._make = partial(CompiledBody, module, parts)
        self._kinds: list[type | None] = []  # of outputs that agreed; None: one did not

    def result(self, tried: Self) -> CompiledBody | None:
        kinds = tried._kinds
        return self._make(kinds[0]) if kinds and None not in kinds else None

    def forward(self, *arguments: object, **named: object) -> object:
        """Return the module's own output, and try one token on the way."""
        ours = self._make(None)
        taken = not arguments
        if not taken or not ours.takes(**named):
            return self._theirs(*arguments, **named)
        own = named | {"past_key_values": copy.deepcopy(named["past_key_values"])}
        try:
            x = ours.run(**own)
        except TypeError:  # layers that take other arguments
            x = None
        theirs = self._theirs(**named)
        self._kinds.append(
            type(theirs) if x is not None and _agree(x, own["past_key_values"], theirs) else None
        )
        return theirs


def _agree(x: torch.Tensor, past: DynamicCache, theirs: object) -> bool:
    """Return whether a decoder gives this output and this cache and no more."""
    if theirs.keys() != {"last_hidden_state", "past_key_values"} or not torch.equal(
        x, theirs.last_hidden_state
    ):
        return False
    pairs = zip(past.layers, theirs.past_key_values.layers, strict=True)
    return all(
        torch.equal(own.keys, other.keys) and torch.equal(own.values, other.values)
        for own, other in pairs
    )
