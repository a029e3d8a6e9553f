"""What a machine has of the packages that not every machine has."""

from functools import cache

import torch

from runtime.session.settings import EXACT, FUSED


@cache
def has_numba() -> bool:
    """Whether numba can be imported: one that does not fit the machine's numpy is found, and then fails."""
    try:
        import numba  # noqa: F401
    except Exception:
        return False
    return True


def experts_by(device: str | torch.device) -> str:
    """The setting of who computes experts there: our kernels, which on a CPU are numba's, or torch."""
    return EXACT if torch.device(device).type == "cpu" and not has_numba() else FUSED
