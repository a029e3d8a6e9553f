"""Layers that keep more than keys and values in a pass of many requests: the states of linear
attention and of short convolutions, and the keys of an index.

Such a layer reads a sequence from its beginning and keeps a state of fixed size in place of keys
and values. transformers hands it the cache of the model. In a shared pass that is the pass itself,
and the layer's own forward computes each piece with the states of that piece's rows, in which
transformers writes in place. Attention that selects keys by an index computes each row by itself,
since the selection depends on the length of the row.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicIndexedLayer, LinearAttentionLayer

from runtime.model.rows.indexed import NAME, IndexedForward, PiecePast
from runtime.model.rows.passes import RowPass, RowPiece, RowWay

_CACHES = {"cache_params", "past_key_values"}  # names of the cache in a forward
_MOST_STATES = 3  # of a layer: Qwen4-Exp's
_OF_TOKENS = ("hidden_states", "input_ids")  # inputs [1, T, ...]
_KINDS = ("conv_states", "recurrent_states")  # as LinearAttentionLayer names them


def stateful(model: PreTrainedModel) -> dict[nn.Module, str]:
    """Return the modules of a model that keep states, and the name of the cache among the inputs of
    each."""
    return _mixers(model, LinearAttentionLayer)


def _mixers(model: PreTrainedModel, kind: type) -> dict[nn.Module, str]:
    """Return the mixers of those layers for which the cache has a layer of this kind."""
    return mixers(model, {i for i, one in enumerate(_layers(model)) if isinstance(one, kind)})


def mixers(model: PreTrainedModel, layers: set[int]) -> dict[nn.Module, str]:
    """Return the modules of decoder layers with these numbers that take a cache, and its name among
    their inputs."""
    indices = set(map(str, layers))
    found = {}
    for name, module in model.named_modules() if layers else ():
        if indices.isdisjoint(name.split(".")[-2:-1]) or not hasattr(module, "layer_idx"):
            continue
        if cache := inspect.signature(type(module).forward).parameters.keys() & _CACHES:
            [found[module]] = cache
    return found


def windows(model: PreTrainedModel) -> dict[int, int]:
    """Return the tokens that attention sees in those layers that have a window."""
    layers = enumerate(_layers(model))
    return {index: one.sliding_window for index, one in layers if getattr(one, "is_sliding", False)}


def _layers(model: PreTrainedModel) -> list[object]:
    """Return the layers of the cache that a model makes by its config."""
    return DynamicCache(config=model.config.get_text_config()).layers


@contextmanager
def by_piece(model: PreTrainedModel, own: str) -> Iterator[RowWay]:
    """Have the modules that keep states compute each piece of a shared pass by itself, and those
    with an index each row. Yields the way of the model, which attends by `own` there."""
    states = stateful(model)
    indexed = _mixers(model, DynamicIndexedLayer)
    with ExitStack() as undo:
        for module in (*states, *indexed):
            if "forward" in vars(module):  # which a decoder has put there
                undo.callback(setattr, module, "forward", module.forward)
            else:
                undo.callback(delattr, module, "forward")
        for module, cache in states.items():
            module.forward = StatefulForward(module, cache)
        for module, cache in indexed.items():
            module.forward = IndexedForward(module, module.forward, cache, own, _rotary(model))
        yield RowWay(own, windows(model), bool(states), bool(states or indexed))


def _rotary(model: PreTrainedModel) -> nn.Module:
    return next(one for name, one in model.named_modules() if name.endswith(".rotary_emb"))


class StatefulForward:
    """A forward of `module` that computes each piece of a shared pass by itself. `cache` is the
    name of the cache among its inputs."""

    def __init__(self, module: nn.Module, cache: str) -> None:
        self._forward = module.forward  # before it is replaced
        self._index = module.layer_idx
        self._cache = cache
        self._names = [*inspect.signature(type(module).forward).parameters][1:]

    def __call__(self, *args: object, **given: object) -> object:
        given |= zip(self._names, args, strict=False)
        rows = given.get(self._cache)
        if not isinstance(rows, RowPass):
            return self._forward(**given)
        given.pop(NAME, None)
        spans = rows.spans()
        outputs = [one for span in spans for one in self._of_piece(*span, given)]
        if not isinstance(outputs[0], tuple):
            return _one_after_the_other(outputs)
        firsts, *others = zip(*outputs, strict=True)
        return _one_after_the_other(firsts), *[None] * len(others)  # of states, which nothing reads

    def _of_piece(
        self, piece: RowPiece, tokens: slice, given: Mapping[str, object]
    ) -> Iterator[object]:
        """Yield the outputs of a piece, token by token where some may be forgotten."""
        if piece.notes is None:
            yield self._of_tokens(piece, tokens, given)
            return
        piece.note(self._index, self)
        for begin in range(tokens.start, tokens.stop):
            yield self._of_tokens(piece, slice(begin, begin + 1), given)
            piece.note(self._index, self)

    def _of_tokens(self, piece: RowPiece, tokens: slice, given: Mapping[str, object]) -> object:
        past = _past_of(piece, self._index)
        own = {
            name: piece.by_row(given[name][:, tokens], 1) for name in _OF_TOKENS if name in given
        }
        output = self._forward(**given | own | {self._cache: past})
        _keep(piece, self._index, past.layers[self._index])
        return output


def _one_after_the_other(outputs: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the tokens of pieces [n, S, H] as those of one pass, [1, T, H]."""
    return torch.cat([each.reshape(1, -1, each.shape[-1]) for each in outputs], dim=1)


def _past_of(piece: RowPiece, index: int) -> PiecePast:
    """Return the states of a layer in the rows of a piece, which are written in place; none before
    the first token of these rows."""
    held = piece.block.states.get(index, {})
    layer = LinearAttentionLayer(_MOST_STATES)
    for (kind, number), rows in held.items():
        state = rows[piece.rows]
        getattr(layer, kind)[number] = state
        getattr(layer, f"is_{kind}_initialized")[number] = True
        layer.has_previous_state[number] = True
        if kind == "conv_states":
            layer.conv_kernel_size[number] = state.shape[-1]
    return PiecePast(index, layer)


def _keep(piece: RowPiece, index: int, layer: LinearAttentionLayer) -> None:
    """Keep the states that a layer made at the first token of all rows of a block."""
    held = piece.block.states.setdefault(index, {})
    for kind in _KINDS:
        for number, state in getattr(layer, kind).items():
            if state is not None:
                held.setdefault((kind, number), state)
