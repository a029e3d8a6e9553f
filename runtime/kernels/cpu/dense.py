"""The linear layers outside the experts in compiled code, for one token: when torch multiplies a bfloat16 matrix by one
vector, it reads the matrix at a fraction of the memory's bandwidth.

Routers are not replaced, so that they choose a token's experts with the model's own bits.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional as F

from runtime.kernels.cpu.threads import KernelThreads, by_rows
from runtime.kernels.load import AS_NUMPY, kernels
from runtime.model.open import MoeModel


class CompiledLinear:
    """Replaces `forward` in every plain linear layer, from `install` to `uninstall`; `threads` share its rows."""

    def __init__(self, opened: MoeModel, threads: KernelThreads) -> None:
        self._threads = threads
        routers = {layer.gate for layer in opened.layers}  # in some families a router is a plain linear layer
        self._layers = {layer for layer in opened.model.modules() if _is_plain(layer) and layer not in routers}

    def are_whole(self, layers: Iterable[nn.Linear]) -> bool:
        """Whether all of these layers are replaced, and computed on one thread."""
        return all(layer in self._layers and self._threads.num_shares(layer.weight.nbytes) == 1 for layer in layers)

    def install(self) -> None:
        for layer in self._layers:
            layer.forward = _forward(layer, self._threads)

    def uninstall(self) -> None:
        for layer in self._layers:
            layer.__dict__.pop("forward", None)


def _is_plain(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype in AS_NUMPY
        and layer.weight.is_contiguous()
    )


def _forward(layer: nn.Linear, threads: KernelThreads) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the replacement of the layer's `forward`, x [..., I] -> [..., O]; torch computes more than one token."""
    kind, dtype, address = AS_NUMPY[layer.weight.dtype], layer.weight.dtype, layer.weight.data_ptr()
    bias = torch.empty(0, dtype=dtype) if layer.bias is None else layer.bias.detach()
    bias, project = bias.view(kind).numpy(), kernels("cpu.gated").project
    num_inputs, num_outputs = layer.in_features, layer.out_features
    if (num_shares := threads.num_shares(layer.weight.nbytes)) > 1:
        project = by_rows(project, threads, num_shares)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.numel() != num_inputs or x.dtype is not dtype or x.requires_grad:
            return F.linear(x, layer.weight, layer.bias)
        out = torch.empty(*x.shape[:-1], num_outputs, dtype=dtype)
        project(address, bias, x.reshape(-1).view(kind).numpy(), out.view(kind).view(-1).numpy())
        return out

    return forward
