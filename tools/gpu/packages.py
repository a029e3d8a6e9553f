"""Choice of the backend that computes experts on a machine, which may lack numba."""

import torch

from runtime.kernels.load import has_numba
from runtime.session.settings import EXACT, FUSED


def experts_by(device: str | torch.device) -> str:
    """Return the setting of the backend for experts on this device: our kernels, which on a CPU
    need numba, or else torch."""
    return EXACT if torch.device(device).type == "cpu" and not has_numba() else FUSED
