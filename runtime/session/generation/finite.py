"""Logits that are NaN or infinite: noticed before a token is drawn, and traced to the module that
gave the first."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

import torch
from torch import nn

from artifacts.errors import BadInput
from artifacts.routing.coactivation import NotFiniteWeights
from runtime.engine.one_expert import ExpertBuffer
from runtime.model.arithmetic import expert_forward
from runtime.model.layers import MoeLayer
from runtime.model.open import MoeModel

_LARGER = {
    "float16": ("bfloat16", "float32"),
    "bfloat16": ("float32",),
}  # types that hold larger products


class NotFinite(BadInput):
    """The model gave no numbers to draw a token by, after the tokens `ids` [1, S]."""

    def __init__(self, ids: torch.Tensor, dtype: torch.dtype, where: str = "") -> None:
        kind = str(dtype).removeprefix("torch.")
        first = (
            f"{where} is the first to give NaN or infinity"
            if where
            else "the logits are NaN or infinite"
        )
        larger = " or ".join(_LARGER.get(kind, ()))
        remedy = f" (set dtype in the model's config.json to {larger})" * bool(larger)
        super().__init__(f"{first}: the weights are damaged, or too large for {kind}{remedy}")
        self.ids = ids
        self.dtype = dtype

    def __reduce__(self) -> tuple:
        """Reach another process as the line alone."""
        return BadInput, self.args


def first_place(opened: MoeModel, run: Callable[[], object]) -> str:
    """Return the module that is the first to give NaN or infinity in the pass `run`, of an expert
    its layer and number; an empty text where every module gives finite numbers."""
    experts = {layer.experts: layer for layer in opened.layers}
    found: list[str] = []

    def look(name: str) -> Callable:
        def hook(
            module: nn.Module, args: tuple, kwargs: Mapping[str, object], output: object
        ) -> None:
            if not found and not all(map(_is_finite, _tensors([output]))):
                layer = experts.get(module)
                found.append(
                    name if layer is None else _expert(opened, layer, [*args, *kwargs.values()])
                )

        return hook

    handles = [
        module.register_forward_hook(look(name), with_kwargs=True)
        for name, module in opened.model.named_modules()
    ]
    try:
        with suppress(NotFiniteWeights):  # of a router behind that place
            run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else ""


def _expert(opened: MoeModel, layer: MoeLayer, given: list[object]) -> str:
    """Return the first of a layer's experts whose output is not finite, by the inputs of the
    experts' module: hidden [T, H] and the selected experts [T, K]."""
    hidden, selected, *_ = _tensors(given)
    buffer = ExpertBuffer(opened)
    for expert in selected.unique().tolist():
        if 0 <= expert < layer.num_experts:
            x = hidden[(selected == expert).any(dim=-1)]
            if not _is_finite(expert_forward(layer.experts, buffer.read(layer.index, expert), x)):
                return f"layer {layer.index}, expert {expert}"
    return f"layer {layer.index}, the sum of its experts"


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has neither NaN nor +inf. Masks and scores of excluded tokens hold
    -inf, which is allowed."""
    return (
        tensor.numel() == 0 or not tensor.is_floating_point() or bool(tensor.max() < float("inf"))
    )
