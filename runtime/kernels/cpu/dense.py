"""Linear layers outside the experts in compiled code, for one token.

When torch multiplies a bfloat16 matrix by one vector, it reads the matrix at a fraction of the
memory's bandwidth. Low-bit matrices are multiplied where they lie, by up to `MOST_TOKENS` tokens;
for more tokens, tiles of their rows are dequantised.

Routers are not replaced, so that they choose a token's experts with the model's own bits.
"""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from runtime.kernels.cpu.threads import KernelThreads, by_rows
from runtime.kernels.load import AS_NUMPY, kernels
from runtime.model.open import MoeModel
from runtime.model.quantised_linear import QuantisedLinear, stored
from runtime.model.quantised_matrix import linear_in_tiles

MOST_TOKENS = 4


class CompiledLinear:
    """Replacement of `forward` in every linear layer, from `install` to `uninstall`; `threads`
    share its rows."""

    def __init__(self, opened: MoeModel, threads: KernelThreads) -> None:
        self._threads = threads
        routers = {
            layer.gate for layer in opened.layers
        }  # in some families a router is a plain linear layer
        layers = [layer for layer in opened.model.modules() if layer not in routers]
        self._plain = {layer for layer in layers if _is_plain(layer)}
        self._packed = {layer for layer in layers if _is_packed(layer)}

    def are_whole(self, layers: Iterable[nn.Linear | QuantisedLinear]) -> bool:
        """Return whether all of these layers are replaced and computed on one thread."""
        replaced = self._plain | self._packed
        return all(
            layer in replaced and self._threads.num_shares(stored(layer).nbytes) == 1
            for layer in layers
        )

    def install(self) -> None:
        for layer in self._plain:
            layer.forward = _forward(layer, self._threads)
        for layer in self._packed:
            layer.forward = PackedLinear(layer, self._threads).forward

    def uninstall(self) -> None:
        for layer in (*self._plain, *self._packed):
            layer.__dict__.pop("forward", None)


def _is_plain(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype in AS_NUMPY
        and layer.weight.is_contiguous()
    )


def _is_packed(layer: nn.Module) -> bool:
    return (
        isinstance(layer, QuantisedLinear)
        and layer.blocks.device.type == "cpu"
        and layer.dtype in AS_NUMPY
    )


def linear_operand(layer: nn.Linear | QuantisedLinear) -> tuple[int, int, int]:
    """Return a linear layer as an operand of larger kernels, which read it by its addresses: its
    kind, the address of its matrix, and that of its bias or 0."""
    names = kernels("cpu.published")
    bias = 0 if layer.bias is None else layer.bias.data_ptr()
    kind = (
        getattr(names, layer.form.name)
        if isinstance(layer, QuantisedLinear)
        else kernels("cpu.linear").PLAIN
    )
    return kind, stored(layer).data_ptr(), bias


class PackedLinear:
    """Quantised layer whose matrix is multiplied by tokens where it lies. Sums are rounded once,
    with the bias."""

    def __init__(self, layer: QuantisedLinear, threads: KernelThreads) -> None:
        self._layer = layer
        self._threads = threads
        self._address = layer.blocks.data_ptr()
        self._row_nbytes = layer.blocks.shape[1]
        self._num_shares = threads.num_shares(layer.blocks.nbytes)
        self._is_narrow = layer.dtype is torch.bfloat16 and kernels("cpu.lanes").HAS_PAIRS
        kind = getattr(kernels("cpu.published"), layer.form.name)
        self._multiply = partial(kernels("cpu.blocks").add_blocks_of_32, kind)
        self._bias = None if layer.bias is None else layer.bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Replace the layer's forward, x [..., I] -> [..., O]."""
        layer = self._layer
        num_tokens = x.numel() // self._layer.in_features
        if x.dtype is not layer.dtype or x.requires_grad:
            return F.linear(x, layer.weight, layer.bias)
        tokens = x.reshape(num_tokens, layer.in_features)
        if num_tokens > MOST_TOKENS:
            out = linear_in_tiles([layer.matrix], tokens)
            out = out if layer.bias is None else out + layer.bias
        else:
            sums = torch.from_numpy(self._sums(tokens.float().numpy()))
            out = (sums if self._bias is None else sums + self._bias).to(layer.dtype)
        return out.view(*x.shape[:-1], layer.out_features)

    def _sums(self, tokens: np.ndarray) -> np.ndarray:
        """Return the products of tokens [T, I], float32 [T, O]. Each token is multiplied by all of
        the matrix, in shares of its rows."""
        sums = np.zeros((len(tokens), self._layer.out_features), np.float32)
        borders = [
            sums.shape[1] * share // self._num_shares for share in range(self._num_shares + 1)
        ]
        for x, y in zip(tokens, sums, strict=True):
            parts = [
                partial(self._part, x, y, *each) for each in zip(borders, borders[1:], strict=False)
            ]
            self._threads.run(parts)
        return sums

    def _part(self, x: np.ndarray, y: np.ndarray, first: int, last: int) -> None:
        self._multiply(self._address + first * self._row_nbytes, x, y[first:last], self._is_narrow)


def _forward(layer: nn.Linear, threads: KernelThreads) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the replacement of the layer's `forward`, x [..., I] -> [..., O]; torch computes more
    than one token."""
    kind = AS_NUMPY[layer.weight.dtype]
    dtype = layer.weight.dtype
    address = layer.weight.data_ptr()
    bias = torch.empty(0, dtype=dtype) if layer.bias is None else layer.bias.detach()
    bias = bias.view(kind).numpy()
    project = kernels("cpu.gated").project
    num_inputs = layer.in_features
    num_outputs = layer.out_features
    if (num_shares := threads.num_shares(layer.weight.nbytes)) > 1:
        project = by_rows(project, threads, num_shares)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.numel() != num_inputs or x.dtype is not dtype or x.requires_grad:
            return F.linear(x, layer.weight, layer.bias)
        out = torch.empty(*x.shape[:-1], num_outputs, dtype=dtype)
        project(address, bias, x.reshape(-1).view(kind).numpy(), out.view(kind).view(-1).numpy())
        return out

    return forward
