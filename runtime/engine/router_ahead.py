"""Routers asked ahead: the distribution that a router gives for the input of a router before it."""

from inspect import Parameter, signature
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from runtime.model.layers import MoeLayer
from runtime.model.open import MoeModel

_NUM_TOKENS = 256  # random ones, on which a router is held against its matrix
_OF_THE_PASS = "input_ids"  # the argument that the pass gives to routers that select by the token
# the argument that is the fourth output of the router before, as in zaya
_CARRIED = "router_states"


class RouterAnswer(NamedTuple):
    """Answer of a router that is asked ahead: a distribution [T, E], and the tensor that the next
    router takes of it; None: nothing."""

    p: torch.Tensor
    carried: torch.Tensor | None = None


class RouterAhead:
    """Gives a router's distribution for any input [.., H]: the K experts that it would select there
    rank first.

    A whole router takes ten times as long as its matrix. Where it selects the largest logits and
    these are its matrix times the input (`is_matrix`), the distribution is the softmax of that
    product. Every other router runs whole, with its correction bias, its groups and its further
    `arguments`. These are tensors of its block, the ids of the pass, or the output of the router
    before it.
    """

    def __init__(
        self, layer: MoeLayer, block: nn.Module, *, arguments: tuple[str, ...], is_matrix: bool
    ) -> None:
        self._layer = layer
        self._gate = layer.gate
        self._block = block
        self._arguments = arguments
        self._is_matrix = is_matrix

    def answer(
        self, x: torch.Tensor, ids: torch.Tensor | None, carried: torch.Tensor | None = None
    ) -> RouterAnswer:
        """Return the answer for x [.., H], whose tokens have these ids; `carried` comes from the
        router before."""
        if self._is_matrix and x.dtype == self._gate.weight.dtype:
            return RouterAnswer(_product(self._gate, x).softmax(-1, dtype=torch.float32))
        given = {_OF_THE_PASS: ids, _CARRIED: carried}
        further = {
            name: given[name] if name in given else getattr(self._block, name)
            for name in self._arguments
        }
        output = _run(self._gate, x, **further)
        scores, _, selected, *_ = output
        return RouterAnswer(
            ranked_first(self._layer.distribution(scores), selected), carried_on(output)
        )


def routers_ahead(opened: MoeModel) -> list[RouterAhead]:
    """Return the routers of all layers. There must be no `reason_not_asked`."""
    is_matrix: dict[type, bool] = {}
    routers = []
    for layer in opened.layers:
        gate = layer.gate
        block = _block(opened, layer.name)
        kind = type(layer.gate)
        arguments, _ = _further(gate, block)
        if kind not in is_matrix:  # routers of one class and one config are of one kind
            is_matrix[kind] = not arguments and _selects_by_its_matrix(gate)
        routers.append(RouterAhead(layer, block, arguments=arguments, is_matrix=is_matrix[kind]))
    return routers


def reason_not_asked(opened: MoeModel) -> str | None:
    """Return one line on why routers of this model cannot be asked ahead: they take arguments that
    only their own layer knows. None: all can be asked."""
    for layer in opened.layers:
        _, unknown = _further(layer.gate, _block(opened, layer.name))
        if unknown:
            return (
                f"routers of {opened.family} cannot be asked ahead: only their own layer knows "
                f"their {unknown[0]}"
            )
    return None


def carried_on(output: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """Return the output of a router that the next router takes; None if it takes nothing."""
    return output[3] if len(output) > 3 else None


def ranked_first(p: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
    """Assign the values of distributions `p` [T, E] to experts anew: the largest K to the
    `selected` [T, K] and the rest to the others, both in the order that they have in `p`.

    The values of the other experts are reduced by one unit in the last place, so that none of them
    ties with a selected expert.
    """
    values, experts = p.sort(dim=1, descending=True, stable=True)
    is_selected = torch.zeros_like(p).scatter_(1, selected, 1.0)
    order = is_selected.gather(1, experts).argsort(dim=1, descending=True, stable=True)
    others = values[:, selected.shape[1] :]
    others.copy_(others.nextafter(torch.zeros_like(others)))
    return torch.empty_like(p).scatter_(1, experts.gather(1, order), values)


def _block(opened: MoeModel, experts: str) -> nn.Module:
    return opened.model.get_submodule(experts.rpartition(".")[0])


def _further(gate: nn.Module, block: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the router's arguments beside its input: the known ones, which its block,
    the pass or the router before has, and the unknown ones.

    An optional argument that none of them has is left out, if the block's forward takes nothing but
    the router's input.
    """
    known = []
    unknown = []
    for parameter in _parameters(gate)[1:]:
        if parameter.name in (_OF_THE_PASS, _CARRIED) or hasattr(block, parameter.name):
            known.append(parameter.name)
        elif parameter.default is Parameter.empty or len(_parameters(block)) > 1:
            unknown.append(parameter.name)
    return tuple(known), tuple(unknown)


def _parameters(module: nn.Module) -> list[Parameter]:
    """Return the parameters of the forward of this module's class, without `self`."""
    return list(signature(type(module).forward).parameters.values())[1:]


def _selects_by_its_matrix(gate: nn.Module) -> bool:
    """Return whether the router selects the largest of its logits, and these are its matrix times
    its input.

    A router with any other state, such as a correction bias, counts as one that does not: the state
    may change the choice for few tokens. Without such state only the code is left, and limits to
    groups show on some of a few hundred random tokens.
    """
    state = {name for name, _ in (*gate.named_parameters(), *gate.named_buffers())}
    if "weight" not in state or not state <= {"weight", "bias"} or gate.weight.dim() != 2:
        return False
    random = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        x = torch.randn(_NUM_TOKENS, gate.weight.shape[1], generator=random).to(gate.weight)
        x /= gate.weight.norm(
            dim=1
        ).mean()  # logits near 1: a softmax of large ones is 0 for many experts alike
        logits, _, selected, *_ = _run(gate, x)
        if not torch.equal(logits, _product(gate, x)):
            return False
        chosen = logits.gather(1, selected).sort(descending=True).values
        return torch.equal(chosen, logits.topk(selected.shape[1]).values)


def _product(gate: nn.Module, x: torch.Tensor) -> torch.Tensor:
    tokens = x if x.dim() == 2 else x.flatten(0, -2)
    return linear(tokens, gate.weight, getattr(gate, "bias", None))


def _run(gate: nn.Module, x: torch.Tensor, **further: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the router's output, without its hooks, which would keep the result."""
    return type(gate).forward(gate, x, **further)
