"""Loops over the logits of a whole vocabulary of V tokens, by a mask of one bit a token."""

import numpy as np

from artifacts.common.numba_loops import kernel


@kernel("void(float32[::1], uint8[::1])", exact=True)
def bar(scores, mask):
    """Set scores [V] to minus infinity where their bits, lowest first in each byte, are not set or
    not there."""
    num_told = min(len(scores), 8 * len(mask))
    for place in range((num_told + 7) // 8):
        bits = mask[place]
        if bits != 255:
            for token in range(8 * place, min(8 * place + 8, num_told)):
                if not bits >> (token - 8 * place) & 1:
                    scores[token] = -np.inf
    scores[num_told:] = -np.inf
