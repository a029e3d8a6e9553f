"""Holds compiled attention against a model's own modules, on the arguments that they are given in a short pass."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers.cache_utils import DynamicLayer

from runtime.kernels.cpu.attention_parts import Heads, Rotation, recognise_heads, rotations
from runtime.kernels.cpu.compiled_attention import CompiledAttention
from runtime.kernels.cpu.compiled_norm import BOUNDS
from runtime.model.open import MoeModel

_SIZES = {1.0: 1.0, 8.0: 16.0, 64.0: float("inf")}
"""What a token's numbers are multiplied by, so that limits show, and by how much the bound of the output is then: large
scores leave one position, and roundings which. Keys and values keep the bound."""

_FAR = float("inf")
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
        if means[nearest] == _FAR:
            return "another arithmetic"
        return self._candidate(nearest)

    def forward(self, hidden_states: torch.Tensor, *others: object, **named: object) -> object:
        """The module's own output; on the way, one token is tried."""
        if not others:
            self._try(hidden_states, named)
        out = self._theirs(hidden_states, *others, **named)
        self._num_outputs = len(out) if isinstance(out, tuple) else 0
        return out

    def _try(self, x: torch.Tensor, named: dict[str, object]) -> None:
        """Compare the rotations that take these arguments, and that were within the bounds so far."""
        near = [rotation for rotation, seen in self._deviations.items() if _FAR not in seen]
        candidates = {rotation: self._candidate(rotation) for rotation in near}
        candidates = {rotation: each for rotation, each in candidates.items() if each.takes(x, **named)}
        for size in _SIZES if candidates else ():
            theirs, layer = self._apart(self._theirs, x * size, named)
            if not all(each.isfinite().all() for each in (theirs, layer.keys, layer.values)):
                continue  # more than float16 holds
            for rotation, ours in candidates.items():
                got, mine = self._apart(partial(_attended, ours, self._module.layer_idx), x * size, named)
                self._deviations[rotation].append(_deviation(got, mine, theirs, layer, size))

    def _apart(self, run: Callable, x: torch.Tensor, named: dict[str, object]) -> tuple[torch.Tensor, DynamicLayer]:
        """The output of `run` with a copy of the cache's layer, and that layer."""
        cache, index = copy.copy(named["past_key_values"]), self._module.layer_idx
        cache.layers = [*cache.layers]
        cache.layers[index] = copy.deepcopy(cache.layers[index])
        out = run(x, **named | {"past_key_values": cache})
        return out[0] if isinstance(out, tuple) else out, cache.layers[index]


def _attended(ours: CompiledAttention, index: int, x: torch.Tensor, **named: object) -> torch.Tensor:
    layer = named["past_key_values"].layers[index]
    return ours.attend(x, named.get("position_embeddings"), named.get("attention_mask"), layer)


def _deviation(got: torch.Tensor, mine: DynamicLayer, theirs: torch.Tensor, layer: DynamicLayer, size: float) -> float:
    """The mean deviation of the token's keys, for in outputs two roundings are hard to tell apart; infinite out of
    bounds."""
    bound = BOUNDS[got.dtype]
    keys = _distance(mine.keys[:, :, -1], layer.keys[:, :, -1])
    values = _distance(mine.values[:, :, -1], layer.values[:, :, -1])
    is_near = keys.max() <= bound and values.max() <= bound and _distance(got, theirs).max() <= bound * _SIZES[size]
    return keys.mean().item() if is_near else _FAR


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return (ours.float() - theirs.float()).abs() / theirs.float().abs().max().clamp_min(torch.finfo().tiny)
