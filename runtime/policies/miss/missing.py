"""What a step wants and does not find."""

import numpy as np

from runtime.policies.base import Residents, Step, fitting


def beyond_free(step: Step, residents: Residents, *, fill: bool) -> np.ndarray:
    """[T, K] ranks whose expert is absent; with `fill` less those that the empty slots of the scope take, first come
    first served."""
    missing = residents.absent[step.selected]
    if not fill or not any(residents.num_free):
        return missing
    filled = fitting(residents.missing(step), residents.num_free)
    return missing & ~np.isin(step.selected, filled)
