"""Products with replicas in any code, packed or trellis."""

from collections.abc import Iterable

import torch
from torch import nn

from artifacts.quantisation.packing import Packed
from artifacts.quantisation.trellis.trellis import Trellis
from runtime.kernels import low_bit, trellis
from runtime.kernels.load import compiler, kernels


def project_replica(
    module: nn.Module,
    weights: dict[str, Packed | Trellis | torch.Tensor],
    name: str,
    x: torch.Tensor,
) -> torch.Tensor:
    """Compute one projection of a replica, x [t, in] -> [t, out]; `expert_forward` takes it in
    place of `project`.

    A replica's matrix is [out, in], whether or not the module transposes its own weights.
    """
    matrix = weights[name]
    y = trellis.linear(x, matrix) if isinstance(matrix, Trellis) else low_bit.linear(x, matrix)
    return y + weights[f"{name}_bias"] if module.has_bias else y


def make_ready(
    packed: Iterable[int], *, has_trellis: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Compile the kernels of packed codes of these widths, and of trellis codes, for x of this
    dtype, before the first token needs them; the first compilation takes seconds."""
    low_bit.make_ready(packed, dtype, device)
    if has_trellis and compiler(device) == "numba":
        kernels("cpu.replicas.trellis").make_ready()


def kernel_names(device: torch.device, *, has_packed: bool, has_trellis: bool) -> str:
    """Return the names of the kernels that compute on replicas on this device, for the receipt."""
    named = [f"trellis codes: {trellis.kernel_name(device)}"] if has_trellis else []
    return "; ".join(([f"{low_bit.kernel_name(device)}"] if has_packed else []) + named)
