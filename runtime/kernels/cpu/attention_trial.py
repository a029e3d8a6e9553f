"""Holds compiled attention against a model's own modules, on the arguments that they are given in a short pass."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from runtime.kernels.cpu.attention_parts import Heads, Rotation, recognise_heads, rotations
from runtime.kernels.cpu.compiled_attention import CompiledAttention
from runtime.kernels.cpu.compiled_norm import BOUNDS
from runtime.model.open import MoeModel

_SIZES = {1.0: 1.0, 8.0: 16.0, 64.0: float("inf")}
"""What a token's numbers are multiplied by, so that limits show, and by how much the bound of the output is then: large
scores leave one position, and roundings which. Keys and values keep the bound."""

_NUM_PROMPT, _POSITIONS = 5, 4096  # tokens of the prompt; positions of a model that does not say how many it has


def compiled_attentions(opened: MoeModel) -> dict[nn.Module, CompiledAttention | str]:
    """Every attention of the model in compiled code, or what hinders that."""
    modules = [module for module in opened.model.modules() if _is_attention(module)]
    recognised = {module: recognise_heads(module) for module in modules}
    trials = {module: _Trial(module, heads) for module, heads in recognised.items() if isinstance(heads, Heads)}
    if trials:
        _run(opened, trials)
    return recognised | {module: trial.result() for module, trial in trials.items()}


def _is_attention(module: nn.Module) -> bool:
    """Whether a module has a place in the cache and projects its output."""
    return hasattr(module, "layer_idx") and any(hasattr(module, name) for name in ("o_proj", "out_proj"))


def _run(opened: MoeModel, trials: dict[nn.Module, "_Trial"]) -> None:
    """Run a prompt and two tokens, one right behind it and one as far as the model's positions go. Experts are zero."""
    model, random = opened.model, torch.Generator().manual_seed(0)
    ids = torch.randint(model.get_input_embeddings().num_embeddings, (1, _NUM_PROMPT + 2), generator=random)
    last = getattr(model.config.get_text_config(), "max_position_embeddings", _POSITIONS) - 1
    with _watched(opened, trials), torch.inference_mode():
        past = getattr(model(input_ids=ids[:, :_NUM_PROMPT], use_cache=True), "past_key_values", None)
        for place, position in ((_NUM_PROMPT, _NUM_PROMPT), (_NUM_PROMPT + 1, last)):
            at = torch.tensor([[position]])
            model(input_ids=ids[:, place : place + 1], position_ids=at, past_key_values=past, use_cache=True)


@contextmanager
def _watched(opened: MoeModel, trials: dict[nn.Module, "_Trial"]) -> Iterator[None]:
    replaced = {layer.experts: lambda hidden, *_: torch.zeros_like(hidden) for layer in opened.layers}
    replaced |= {module: trial.forward for module, trial in trials.items()}
    for module, forward in replaced.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in replaced:
            del module.forward


class _Trial:
    """Compares the ways in which one attention may rotate its heads with what the module gives."""

    def __init__(self, module: nn.Module, heads: Heads) -> None:
        self._module, self._heads = module, heads
        self._theirs = partial(type(module).forward, module)
        self._deviations: dict[Rotation, list[float]] = {rotation: [] for rotation in rotations(heads)}
        self._num_outputs = 0

    def _candidate(self, rotation: Rotation) -> CompiledAttention:
        return CompiledAttention(self._module, self._heads, rotation, num_outputs=self._num_outputs)

    def result(self) -> CompiledAttention | str:
        """The nearest of those that are within the bounds, on all arguments."""
        means = {rotation: sum(seen) / len(seen) for rotation, seen in self._deviations.items() if seen}
        if not means:
            return "one token in a cache of another kind"
        nearest = min(means, key=means.get)
        if means[nearest] == float("inf"):
            return "another arithmetic"
        return self._candidate(nearest)

    def forward(self, hidden_states: torch.Tensor, *others: object, **named: object) -> object:
        """The module's own output; on the way, one token is tried."""
        if not others:
            for rotation, seen in self._deviations.items():
                candidate = self._candidate(rotation)
                if candidate.takes(hidden_states, **named):
                    seen.extend(self._deviation(candidate, hidden_states * size, size, named) for size in _SIZES)
        out = self._theirs(hidden_states, *others, **named)
        self._num_outputs = len(out) if isinstance(out, tuple) else 0
        return out

    def _deviation(self, ours: CompiledAttention, x: torch.Tensor, size: float, named: dict[str, object]) -> float:
        """The mean deviation of keys, for in outputs two roundings are hard to tell apart; infinite out of bounds."""
        bound, index = BOUNDS[x.dtype], self._module.layer_idx
        theirs, mine = (_with_copy(named["past_key_values"], index) for _ in range(2))
        out = self._theirs(x, **named | {"past_key_values": theirs})
        their_layer, my_layer = theirs.layers[index], mine.layers[index]
        got = ours.attend(x, named.get("position_embeddings"), named.get("attention_mask"), my_layer)
        keys = _distance(my_layer.keys[:, :, -1], their_layer.keys[:, :, -1])
        values = _distance(my_layer.values[:, :, -1], their_layer.values[:, :, -1])
        output = _distance(got, out[0] if isinstance(out, tuple) else out)
        is_near = keys.max() <= bound and values.max() <= bound and output.max() <= bound * _SIZES[size]
        return keys.mean().item() if is_near else float("inf")


def _with_copy(cache: object, index: int) -> object:
    """The cache with a copy of one layer."""
    held = copy.copy(cache)
    held.layers = [*cache.layers]
    held.layers[index] = copy.deepcopy(cache.layers[index])
    return held


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return (ours.float() - theirs.float()).abs() / theirs.float().abs().max().clamp_min(torch.finfo().tiny)
