"""Who computes experts on a machine, which may lack numba."""

import torch

from runtime.kernels.load import has_numba
from runtime.session.settings import EXACT, FUSED


def experts_by(device: str | torch.device) -> str:
    """The setting of who computes experts there: our kernels, which on a CPU are numba's, or
    torch."""
    return EXACT if torch.device(device).type == "cpu" and not has_numba() else FUSED
