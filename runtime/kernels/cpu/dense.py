"""Linear layers outside the experts in compiled code, for one token or a few.

When torch multiplies a bfloat16 matrix by one vector, it reads the matrix at a fraction of the
memory's bandwidth. Matrices are multiplied where they lie, by up to `MOST_TOKENS` tokens, each of
which gets the bits that it would get alone; for more tokens, torch multiplies, and tiles of the
rows of low-bit matrices are dequantised.

Routers are not replaced, so that they choose a token's experts with the model's own bits.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from runtime.kernels.cpu.row_shares import MatrixShares, Rows, plain_rows
from runtime.kernels.cpu.threads import KernelThreads
from runtime.kernels.load import AS_NUMPY, is_cpu_operand, kernels
from runtime.model.open import MoeModel
from runtime.model.quantised.quantised_linear import QuantisedLinear, stored
from runtime.model.quantised.quantised_matrix import linear_in_tiles

MOST_TOKENS = 9
"""Tokens of one sequence that compiled code takes in one pass: one and up to eight drafts."""


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
        self.round_to(None)

    def round_to(self, bits: int | None) -> None:
        """Multiply low-bit matrices by tokens of so many bits from here on; None: as they are."""
        for layer in self._packed:
            layer.activations = bits

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
        type(layer) is nn.Linear and is_cpu_operand(layer.weight) and layer.weight.is_contiguous()
    )


def _is_packed(layer: nn.Module) -> bool:
    return isinstance(layer, QuantisedLinear) and is_cpu_operand(layer.blocks, layer.dtype)


def linear_operand(layer: nn.Linear | QuantisedLinear) -> tuple[int, int, int]:
    """Return a linear layer as an operand of larger kernels, which read it by its addresses: its
    kind, the address of its matrix, and that of its bias or 0."""
    bias = 0 if layer.bias is None else layer.bias.data_ptr()
    is_packed = isinstance(layer, QuantisedLinear)
    kind = _kind_of(layer) if is_packed else kernels("cpu.linear").PLAIN
    return kind, stored(layer).data_ptr(), bias


def _kind_of(layer: QuantisedLinear) -> int:
    names = kernels("cpu.published.published")
    return getattr(names, layer.form.name) + names.IN_BYTES * (layer.activations is not None)


class PackedLinear:
    """Quantised layer whose matrix is multiplied by tokens where it lies. Sums are rounded once,
    with the bias."""

    def __init__(self, layer: QuantisedLinear, threads: KernelThreads) -> None:
        self._layer = layer
        is_narrow = layer.dtype is torch.bfloat16 and kernels("cpu.lanes").HAS_PAIRS
        names = kernels("cpu.published.published")
        fields = np.full(names.NUM_FIELDS, -1)
        fields[names.KIND] = _kind_of(layer)
        fields[names.CODES] = layer.blocks.data_ptr()
        fields[names.BLOCK_NBYTES] = layer.form.nbytes
        kernel = kernels("cpu.published.blocks").multiply_blocks_of_32
        count, nbytes = layer.blocks.shape
        matrix = Rows(0, count, nbytes, fields, kernel, is_narrow)
        self._matrix = _shared(matrix, layer.in_features, threads)
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
            sums = np.zeros((num_tokens, layer.out_features), np.float32)
            self._matrix.add(tokens.float().numpy(), sums)
            out = _rounded(sums, self._bias, layer.dtype)
        return out.view(*x.shape[:-1], layer.out_features)


def _shared(matrix: Rows, num_inputs: int, threads: KernelThreads) -> MatrixShares:
    """Return the matrix, for as many threads as are worth it."""
    nbytes = matrix.count * matrix.nbytes
    num_shares = threads.num_row_shares(nbytes) if threads.num_shares(nbytes) > 1 else 1
    return MatrixShares(matrix, num_inputs, threads, num_shares)


def _rounded(sums: np.ndarray, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 sums plus a bias in float32, rounded once."""
    out = torch.from_numpy(sums)
    return (out if bias is None else out + bias).to(dtype)


def _forward(layer: nn.Linear, threads: KernelThreads) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the replacement of the layer's `forward`, x [..., I] -> [..., O]; torch computes more
    than `MOST_TOKENS` tokens."""
    kind = AS_NUMPY[layer.weight.dtype]
    dtype = layer.weight.dtype
    address = layer.weight.data_ptr()
    num_inputs = layer.in_features
    num_outputs = layer.out_features
    bias = None if layer.bias is None else layer.bias.detach()
    if threads.num_shares(layer.weight.nbytes) > 1:
        row = plain_rows(dtype, address, num_outputs, num_inputs * dtype.itemsize)
        matrix = _shared(row, num_inputs, threads)
        wide_bias = None if bias is None else bias.float()

        def few(x: torch.Tensor) -> torch.Tensor:
            sums = np.zeros((len(x), num_outputs), np.float32)
            matrix.add(x.float().numpy(), sums)
            return _rounded(sums, wide_bias, dtype)

    else:
        project = kernels("cpu.gated").project
        own_bias = 0 if bias is None else bias.data_ptr()

        def few(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty(len(x), num_outputs, dtype=dtype)
            project(address, own_bias, x.view(kind).numpy(), out.view(kind).numpy())
            return out

    def forward(x: torch.Tensor) -> torch.Tensor:
        is_few = 0 < x.numel() <= MOST_TOKENS * num_inputs
        if not is_few or x.dtype is not dtype or x.requires_grad:
            return F.linear(x, layer.weight, layer.bias)
        return few(x.reshape(-1, num_inputs).contiguous()).view(*x.shape[:-1], num_outputs)

    return forward
