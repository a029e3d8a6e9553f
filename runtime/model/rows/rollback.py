"""A pass of several tokens over the cache of one sequence, of which the last ones may be forgotten.

Layers that keep all keys are cropped; windows keep more than they need until it is known what
stays. Modules whose layers keep anything else read the tokens one after the other, as they do alone
and with the same bits, and what their layer keeps after each is noted: forgetting is a choice among
these notes.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from runtime.model.rows.states import mixers

_NOTHING = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))
_LINEAR = "linear_cache"  # states of MiniMax's cache, by layer
_OF_TOKENS = ("hidden_states", "input_ids", "position_embeddings")  # inputs [1, T, ...]
Kept = dict[tuple[str, object], object]
"""What a layer keeps, by attribute and, in an attribute that is a dictionary, by its key."""


@dataclass(slots=True)
class _Notes:
    """What a module's layer kept before a pass and after each token of it."""

    cache: Cache
    index: int
    before: Kept
    after: list[Kept] = field(default_factory=list)

    def forget(self, count: int) -> None:
        """Take back what the module changed by the last `count` tokens."""
        last = self.after[-1]
        right = self.after[-1 - count] if count < len(self.after) else self.before
        for place, value in right.items():
            if not _are_same(value, last[place]):
                _put(self.cache, self.index, place, value)


class Past:
    """A cache after a pass within `forgettable`: call `forget` once, also where all stays."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.notes: list[_Notes] = []

    def forget(self, count: int) -> None:
        """Make the cache that of the sequence without its last `count` tokens."""
        for notes in self.notes if count else ():
            notes.forget(count)
        for layer in self.cache.layers:
            if _is_window(layer):
                layer.crop(-count)
                layer.record_past = False
            elif count and _is_cropped(layer):
                layer.crop(-count)


@contextmanager
def forgettable(model: PreTrainedModel, cache: Cache) -> Iterator[Past]:
    """Have one pass over several tokens keep what `Past.forget` needs."""
    past = Past(cache)
    others = {index for index, layer in enumerate(cache.layers) if not _reads_several(layer)}
    others |= {i for i, state in enumerate(getattr(cache, _LINEAR, ())) if len(state)}
    with ExitStack() as undo:
        for layer in filter(_is_window, cache.layers):
            layer.record_past = True
        for module, name in mixers(model, others).items():
            if "forward" in vars(module):  # which a decoder has put there
                undo.callback(setattr, module, "forward", module.forward)
            else:
                undo.callback(delattr, module, "forward")
            module.forward = _OneByOne(module, name, past)
        yield past


def _reads_several(layer: object) -> bool:
    """Return whether the module of a layer gives the same for several tokens at once. Which of
    several equal keys an index selects depends on the tokens behind them."""
    if _is_indexed(layer):
        return False
    return _is_window(layer) or _is_cropped(layer) or isinstance(layer, _NOTHING)


def _is_indexed(layer: object) -> bool:
    return isinstance(layer, DynamicIndexedLayer)


def _is_window(layer: object) -> bool:
    return isinstance(layer, DynamicSlidingWindowLayer) and _is_known(layer)


def _is_cropped(layer: object) -> bool:
    return isinstance(layer, DynamicLayer) and not _is_window(layer) and _is_known(layer)


def _is_known(layer: object) -> bool:
    """Return whether a layer keeps keys and values, an index of them, and no more: it says itself
    how it is cropped."""
    kind = type(layer)
    own = kind.__module__ == cache_utils.__name__ or kind.__module__.startswith("runtime.")
    return own and not hasattr(layer, "recurrent_states")


class _OneByOne:
    """A forward of `module` that reads the tokens of a pass one after the other."""

    def __init__(self, module: nn.Module, cache: str, past: Past) -> None:
        self._forward = module.forward  # before it is replaced
        self._index = module.layer_idx
        self._past = past
        self._names = [*inspect.signature(type(module).forward).parameters][1:]

    def __call__(self, *args: object, **given: object) -> object:
        given |= zip(self._names, args, strict=False)
        num_tokens = given["hidden_states"].shape[1]
        if num_tokens == 1:
            return self._forward(**given)
        cache = self._past.cache
        place = cache, self._index
        layer = cache.layers[self._index] if self._index < len(cache.layers) else None
        notes = _Notes(*place, _kept(*place))
        outputs = []
        for index in range(num_tokens):
            outputs.append(self._forward(**_of_token(layer, given, index, num_tokens)))
            notes.after.append(_kept(*place))
        if not _is_indexed(layer):  # which is cropped
            self._past.notes.append(notes)
        if not isinstance(outputs[0], tuple):
            return torch.cat(outputs, dim=1)
        firsts, *others = zip(*outputs, strict=True)
        # what a module hands to that of the next layer stays apart by token
        return torch.cat(firsts, dim=1), *[None if one[0] is None else [*one] for one in others]


def _of_token(
    layer: object, given: Mapping[str, object], index: int, num_tokens: int
) -> dict[str, object]:
    """Return the inputs of one of the tokens of a pass. It sees all before it, and needs no mask
    unless there is an index."""
    after = num_tokens - 1 - index
    own = {name: value[index] for name, value in given.items() if isinstance(value, list)}
    for name in _OF_TOKENS:
        if (value := given.get(name)) is not None:
            own[name] = _part(value, 1, index, after)
    if (positions := given.get("position_ids")) is not None:
        own["position_ids"] = _part(positions, -1, index, after)
    for name in (each for each in given if each.endswith("mask")):
        own[name] = _mask(given[name], index, after) if _is_indexed(layer) else None
    return {**given, **own}


def _part(value: object, dim: int, index: int, after: int) -> object:
    """Return the part of tensors that is a token's: its own, or that of all up to it where they
    tell of earlier tokens too."""
    if isinstance(value, torch.Tensor):
        size = value.shape[dim]
        own = size == index + 1 + after
        return value.narrow(dim, index, 1) if own else value.narrow(dim, 0, size - after)
    if isinstance(value, Mapping):
        return {name: _part(one, dim, index, after) for name, one in value.items()}
    return type(value)(_part(one, dim, index, after) for one in value)


def _mask(mask: torch.Tensor | None, index: int, after: int) -> torch.Tensor | None:
    if mask is None or mask.dim() < 3:
        return mask if mask is None else _part(mask, -1, index, after)
    return mask.narrow(-2, index, 1).narrow(-1, 0, mask.shape[-1] - after)


def _kept(cache: Cache, index: int) -> Kept:
    """Return what a layer keeps; states, which are written in place, as copies."""
    kept: Kept = {}
    if states := getattr(cache, _LINEAR, ()):
        kept[_LINEAR, index] = states[index]
    for name, value in vars(cache.layers[index]).items() if index < len(cache.layers) else ():
        items = value.items() if isinstance(value, dict) else [(None, value)]
        copies = name.endswith("_states")
        for key, one in items:
            is_copied = copies and isinstance(one, torch.Tensor)
            kept[name, key] = one.clone() if is_copied else one
    return kept


def _are_same(one: object, other: object) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return (
        not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor) and one == other
    )


def _put(cache: Cache, index: int, place: tuple[str, object], value: object) -> None:
    """Set what a layer keeps; a state in its own memory, whose address graphs know."""
    name, key = place
    if name == _LINEAR:
        getattr(cache, _LINEAR)[index] = value
        return
    layer = cache.layers[index]
    if key is None and not isinstance(getattr(layer, name), dict):
        setattr(layer, name, value)
        return
    held = getattr(layer, name)
    if name.endswith("_states") and isinstance(held[key], torch.Tensor):
        held[key].copy_(value)
    else:
        held[key] = value
