"""Comparison of compiled code with a model's own modules, on the arguments that they are given in a
short pass."""

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, NoneType
from typing import Protocol, Self

import torch
from torch import nn
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
)

from runtime.kernels.decoder.norms import BOUNDS
from runtime.model.open import MoeModel

_FAR = float("inf")
# tokens of the prompt; positions of a model that does not say how many it has
_NUM_PROMPT = 5
_SETTINGS = (bool, int, float, str, NoneType, FunctionType)  # types of what tells modules apart
_POSITIONS = 4096
_IN_BLOCKS = "another attention takes no token far behind the others"
CACHE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""The layers of a cache to which one more token is added by `update`."""
CacheLayer = DynamicLayer | StaticLayer
LayerCopy = Callable[[DynamicLayer], CacheLayer]
"""Returns a copy of a cache's layer, to which the candidate adds a token at the last position."""


class CompiledModule(Protocol):
    """Interface of compiled code that may compute a module for one token. `attend` returns its
    output and extends the cache; both methods take the arguments of the module's forward."""

    def takes(self, x: torch.Tensor, **named: object) -> bool: ...

    def attend(self, x: torch.Tensor, **named: object) -> torch.Tensor: ...


class ModuleTrial:
    """Comparison of candidates with one module, whose keys and values are at `index` of the cache.

    `sizes` has factors on a token's numbers, so that limits show, and for each the factor on the
    output's bound. `make` returns the candidate of a name for the number of outputs that the module
    was seen to have. `copy_layer` makes a candidate's layer of the cache. `key_of`, if given,
    returns the key [N, D] that a name stands for: names of other keys are dropped unmade.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        names: list[Hashable],
        make: Callable[[Hashable, int], CompiledModule],
        sizes: Mapping[float, float],
        copy_layer: LayerCopy,
        key_of: Callable[[Hashable, torch.Tensor, dict], torch.Tensor] | None = None,
    ) -> None:
        self._key_of = key_of
        self._index = index
        self._copy_layer = copy_layer
        self._make = make
        self._sizes = sizes
        self._theirs = partial(type(module).forward, module)
        self._deviations: dict[Hashable, list[float]] = {name: [] for name in names}
        self._num_outputs = 0

    def result(self, tried: Self) -> CompiledModule | str:
        """Return the nearest of the candidates that are within the bounds on all arguments, or the
        reason why there is none, as `tried` found for a module of the same kind."""
        means = {name: sum(seen) / len(seen) for name, seen in tried._deviations.items() if seen}
        if not means:
            return "one token in a cache of another kind"
        nearest = min(means, key=means.get)
        if means[nearest] == _FAR:
            return "another arithmetic"
        return self._make(nearest, tried._num_outputs)

    def forward(self, hidden_states: torch.Tensor, *others: object, **named: object) -> object:
        """Return the module's own output, and try one token on the way."""
        if not others:
            self._try(hidden_states, named)
        out = self._theirs(hidden_states, *others, **named)
        self._num_outputs = len(out) if isinstance(out, tuple) else 0
        return out

    def _try(self, x: torch.Tensor, named: dict[str, object]) -> None:
        """Compare the candidates that take these arguments and were within the bounds so far."""
        layer = layer_of(named.get("past_key_values"), self._index)
        if layer is None:
            return
        near = [name for name, seen in self._deviations.items() if _FAR not in seen]
        candidates = {name: self._make(name, self._num_outputs) for name in near}
        given = self._apart(named, self._copy_layer(layer))
        candidates = {name: each for name, each in candidates.items() if each.takes(x, **given)}
        for size, factor in self._sizes.items() if candidates else ():
            own = copy.deepcopy(layer)
            theirs = self._theirs(x * size, **self._apart(named, own))
            theirs = theirs[0] if isinstance(theirs, tuple) else theirs
            if not all(each.isfinite().all() for each in (theirs, own.keys, own.values)):
                continue  # more than float16 holds
            for name, ours in candidates.items():
                if self._key_of:
                    key = self._key_of(name, x * size, named)
                    if _distance(key, own.keys[0, :, -1]).max() > 2 * BOUNDS[x.dtype]:
                        self._deviations[name].append(_FAR)
                        continue
                mine = self._copy_layer(layer)
                got = ours.attend(x * size, **self._apart(named, mine))
                self._deviations[name].append(_deviation(got, mine, theirs, own, factor))

    def _apart(self, named: dict[str, object], layer: CacheLayer) -> dict[str, object]:
        """Return the arguments with a cache that has this layer in the place of its own."""
        cache = copy.copy(named["past_key_values"])
        cache.layers = [*cache.layers]
        cache.layers[self._index] = layer
        return named | {"past_key_values": cache}


def layer_of(past: object, index: int) -> DynamicLayer | None:
    """Return a layer of a cache that grows and has entries; None for a cache of another kind."""
    if type(past) is not DynamicCache or past.offloading or len(past.layers) <= index:
        return None
    layer = past.layers[index]
    return layer if type(layer) in CACHE_LAYERS and layer.is_initialized else None


def run_trials(
    opened: MoeModel, trials: Mapping[nn.Module, ModuleTrial]
) -> dict[nn.Module, CompiledModule | str]:
    """Run a prompt and two tokens, and return the results by module.

    One token is right behind the prompt, the other as far as the model's positions go. Experts
    return their own input. Of modules that differ only in their layer and their weights the first
    is tried for all."""
    if not trials:
        return {}
    if any(getattr(module, "local_blocks", 0) for module in opened.model.modules()):
        return dict.fromkeys(trials, _IN_BLOCKS)  # that one marks a block of keys that is not there
    kinds = {module: _kind(module) for module in trials}
    first = {kind: module for module, kind in reversed(kinds.items())}
    tried = {module: trials[module] for module in first.values()}
    model = opened.model
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(
        model.get_input_embeddings().num_embeddings, (1, _NUM_PROMPT + 2), generator=random
    ).to(model.device)
    last = getattr(model.config.get_text_config(), "max_position_embeddings", _POSITIONS) - 1
    far = {"position_ids": torch.tensor([[last]], device=model.device)}
    with _watched(opened, tried), torch.inference_mode():
        past = getattr(
            model(input_ids=ids[:, :_NUM_PROMPT], use_cache=True), "past_key_values", None
        )
        for place, at in ((_NUM_PROMPT, {}), (_NUM_PROMPT + 1, far)):
            model(input_ids=ids[:, place : place + 1], past_key_values=past, use_cache=True, **at)
    return {module: trial.result(tried[first[kinds[module]]]) for module, trial in trials.items()}


def _kind(module: nn.Module) -> Hashable:
    """Return what modules have in common whose code does the same: classes, settings, sizes."""
    return tuple(
        (
            name,
            type(part),
            *sorted((key, each) for key, each in vars(part).items() if _is_setting(key, each)),
            *((key, each.shape, each.dtype) for key, each in part.named_parameters(recurse=False)),
        )
        for name, part in module.named_modules()
    )


def _is_setting(name: str, value: object) -> bool:
    return name != "layer_idx" and isinstance(value, _SETTINGS)


@contextmanager
def _watched(opened: MoeModel, trials: Mapping[nn.Module, ModuleTrial]) -> Iterator[None]:
    replaced = {layer.experts: lambda hidden, *_: hidden.clone() for layer in opened.layers}
    replaced |= {module: trial.forward for module, trial in trials.items()}
    for module, forward in replaced.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in replaced:
            del module.forward


def _deviation(
    got: torch.Tensor,
    mine: CacheLayer,
    theirs: torch.Tensor,
    layer: DynamicLayer,
    factor: float,
) -> float:
    """Return the mean deviation of the token's keys, or infinity out of bounds. Outputs are not
    used, because two roundings are hard to tell apart in them."""
    bound = BOUNDS[got.dtype]
    keys = _distance(mine.keys[:, :, -1], layer.keys[:, :, -1])
    values = _distance(mine.values[:, :, -1], layer.values[:, :, -1])
    is_near = (
        keys.max() <= bound
        and values.max() <= bound
        and _distance(got, theirs).max() <= bound * factor
    )
    return keys.mean().item() if is_near else _FAR


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return (ours.float() - theirs.float()).abs() / theirs.float().abs().max().clamp_min(
        torch.finfo().tiny
    )
