"""States of linear attention and of short convolutions in a pass of many requests.

Such a layer reads a sequence from its beginning and keeps a state of fixed size in place of keys
and values. transformers hands it the cache of the model. In a shared pass that is the pass itself, and
the layer's own forward computes each piece with the states of that piece's rows, in which
transformers writes in place.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from runtime.model.rows.passes import RowPass, RowPiece

_CACHES = {"cache_params", "past_key_values"}  # names of the cache in a forward
_KINDS = ("conv_states", "recurrent_states")  # as LinearAttentionLayer names them
FORGETFUL = {"jamba"}  # its scan takes no state to begin with


class PiecePast(Cache):
    """The cache of one layer in one piece: the states of its rows. MiniMax has a name of its own
    for the only state of its layers."""

    def __init__(self, index: int, layer: LinearAttentionLayer) -> None:
        super().__init__(layers={index: layer})

    def get_linear_cache(self, index: int) -> torch.Tensor | None:
        """Return the state of a layer [n, heads, D, D], None before its first token."""
        return self.get_recurrent_state(index)

    def set_linear_cache(self, index: int, state: torch.Tensor) -> None:
        """Keep the state of a layer."""
        self.update_recurrent_state(state, index)
        self.layers[index].has_previous_state[0] = True


def stateful(model: PreTrainedModel) -> dict[nn.Module, str]:
    """Return the modules of a model that keep states, and the name of the cache among the inputs of
    each: those modules of a decoder layer of linear attention or convolution that take a cache."""
    layers = enumerate(_layers(model))
    indices = {str(index) for index, one in layers if isinstance(one, LinearAttentionLayer)}
    found = {}
    for name, module in model.named_modules():
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
def by_piece(model: PreTrainedModel) -> Iterator[bool]:
    """Have the modules that keep states compute each piece of a shared pass by itself. Yields
    whether there are any."""
    modules = stateful(model)
    with ExitStack() as undo:
        for module, cache in modules.items():
            if "forward" in vars(module):  # which a decoder has put there
                undo.callback(setattr, module, "forward", module.forward)
            else:
                undo.callback(delattr, module, "forward")
            module.forward = _by_piece(module, cache)
        yield bool(modules)


def _by_piece(module: nn.Module, cache: str) -> Callable[..., object]:
    own = module.forward

    def forward(hidden_states: torch.Tensor, **given: object) -> object:
        past = given.get(cache)
        if not isinstance(past, RowPass):
            return own(hidden_states, **given)
        given.pop("moectl_rows", None)
        outputs = []
        rest: tuple[None, ...] = ()
        for piece, tokens in past.spans():
            of_piece = _past_of(piece, module.layer_idx)
            output = own(piece.by_row(hidden_states[:, tokens], 1), **given | {cache: of_piece})
            if isinstance(output, tuple):  # MiniMax returns its state too, which nothing reads
                output, *others = output
                rest = (None,) * len(others)
            _keep(piece, module.layer_idx, of_piece.layers[module.layer_idx])
            outputs.append(output.reshape(1, -1, output.shape[-1]))
        output = torch.cat(outputs, dim=1)
        return (output, *rest) if rest else output

    return forward


def _past_of(piece: RowPiece, index: int) -> PiecePast:
    """Return the states of a layer in the rows of a piece, which are written in place; none before
    the first token of these rows."""
    held = piece.block.states.get(index, {})
    layer = LinearAttentionLayer(max((number for _, number in held), default=0) + 1)
    for (kind, number), rows in held.items():
        state = rows[: piece.num_rows]
        getattr(layer, kind)[number] = state
        getattr(layer, f"is_{kind}_initialized")[number] = True
        layer.has_previous_state[number] = True
        if kind == "conv_states":
            layer.conv_kernel_size[number] = state.shape[-1]
    return PiecePast(index, layer)


def _keep(piece: RowPiece, index: int, layer: LinearAttentionLayer) -> None:
    """Keep the states that a layer made at the first token of all rows of a block."""
    if index not in piece.block.states:
        piece.block.states[index] = {
            (kind, number): state
            for kind in _KINDS
            for number, state in getattr(layer, kind).items()
            if state is not None
        }
