"""Quantisation of weights besides routed experts to few bits: each linear layer is quantised while
the checkpoint is read, before the next one is, so that the model is never in memory at full width.

transformers' loader asks an on-the-fly quantiser for each parameter (`param_needs_quantization`)
and hands it what it has read (`get_quantize_ops`); it then reads one tensor after another.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from artifacts.errors import BadInput
from artifacts.formats.dense import DENSE, check_dense, is_packed
from artifacts.formats.gguf.ggml import GGML
from artifacts.formats.gguf.ggml_encoding import encode
from runtime.model.layers import MoeLayer
from runtime.model.layout import is_finite
from runtime.model.quantised.quantised_linear import QuantisedEmbedding, QuantisedLinear


class DenseWidth(NamedTuple):
    """Bits of the linear layers besides experts and routers, how many layers have them, and how
    many stay as published because of their shape."""

    bits: int
    num_packed: int
    num_left: int


class DenseQuantiser:
    """Quantises the linear layers of `model` to `bits`, except those in the routers of `layers`.
    Raises BadUsage for other widths than 8 and 4, BadInput where no layer can have them."""

    pre_quantized = False  # an attribute that transformers reads

    def __init__(self, model: PreTrainedModel, bits: int, layers: Iterable[MoeLayer]) -> None:
        check_dense(bits)
        self._model = model
        self._bits = bits
        self._form = GGML[DENSE[bits].name]
        routers = {module for layer in layers for module in layer.gate.modules()}
        linear = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
        linear = {name: each for name, each in linear.items() if each not in routers}
        self._names = [name for name, each in linear.items() if _is_fit(each, bits)]
        if not self._names:
            raise BadInput(
                f"--dense {bits}: no linear layer of this model has rows of whole blocks of "
                f"{self._form.num_weights}: leave out --dense"
            )
        self.width = DenseWidth(bits, len(self._names), len(linear) - len(self._names))
        tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
        self._streamed = {f"{name}.weight" for name in self._names} - tied
        self._damaged: list[str] = []

    # What transformers asks

    def param_needs_quantization(self, model: PreTrainedModel, name: str) -> bool:
        return name in self._streamed

    def get_quantize_ops(self) -> "DenseQuantiser":
        return self

    def convert(
        self, tensors: Mapping[str, object], *, missing_keys: set[str] | None = None, **_: object
    ) -> dict[str, object]:
        """Quantise what was read and put it into the model. Returns what is left to transformers:
        other tensors, and tensors of a wrong shape, which it reports."""
        left = {}
        for name, value in tensors.items():
            matrix = value[0] if isinstance(value, list) else value
            layer_name = name.removesuffix(".weight")
            is_fit = (
                name in self._streamed
                and matrix.shape == self._model.get_submodule(layer_name).weight.shape
            )
            self._streamed.discard(name)
            if not is_fit:
                left[name] = value
                continue
            self._replace(layer_name, matrix)
            if missing_keys is not None:
                missing_keys.discard(name)
        return left

    # The rest, once everything is read

    def finish(self) -> None:
        """Quantise what was not read by itself: matrices that modules share, and parts of a fused
        one. Raises BadInput for matrices that hold NaN or infinity, and for matrices shared by
        other modules than embedding and head."""
        for name in self._names:
            layer = self._model.get_submodule(name)
            if type(layer) is not nn.Linear:
                continue
            owners = self._owners(layer.weight)
            if len(owners) == 1:
                self._replace(name, layer.weight.data)
            else:
                self._replace_tied(name, owners)
        if self._damaged:
            raise BadInput(
                f"{self._damaged[0]}.weight holds NaN or infinity, or numbers beyond "
                f"{self._form.name}"
            )

    def _owners(self, weight: nn.Parameter) -> dict[str, nn.Module]:
        """Return the modules that have this parameter, by name."""
        return {
            name: module
            for name, module in self._model.named_modules()
            if any(own is weight for own in module._parameters.values())
        }

    def _replace_tied(self, name: str, owners: dict[str, nn.Module]) -> None:
        embedding = self._model.get_input_embeddings()
        head = self._model.get_output_embeddings()
        if set(owners.values()) != {embedding, head} or type(embedding) is not nn.Embedding:
            raise BadInput(
                f"--dense {self._bits}: {' and '.join(sorted(owners))} share a matrix and are not "
                "all of a kind that can be quantised: leave out --dense"
            )
        shape = embedding.weight.shape
        dtype = embedding.weight.dtype
        blocks = self._replace(name, embedding.weight.data)
        [embedding_name] = owners.keys() - {name}
        self._put(embedding_name, QuantisedEmbedding(blocks, self._form, shape=shape, dtype=dtype))

    def _replace(self, name: str, matrix: torch.Tensor) -> nn.Parameter:
        """Replace a plain layer by a quantised one. Returns its blocks."""
        layer = self._model.get_submodule(name)
        blocks = nn.Parameter(encode(matrix, self._form), requires_grad=False)
        blocks._is_hf_initialized = True  # or transformers would look for a way to initialise it
        if not is_finite(matrix) or self._form.fault({"blocks": blocks.data}):
            self._damaged.append(name)
        self._put(
            name,
            QuantisedLinear(
                blocks, self._form, shape=matrix.shape, dtype=matrix.dtype, bias=layer.bias
            ),
        )
        return blocks

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, own = name.rpartition(".")
        setattr(self._model.get_submodule(parent), own, module.eval())


def _is_fit(layer: nn.Linear, bits: int) -> bool:
    return type(layer) is nn.Linear and is_packed(layer.out_features, layer.in_features, bits)
