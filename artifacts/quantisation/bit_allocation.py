"""Allocation of bits to experts: by order of importance within a layer, or by gain per byte over
all experts."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from artifacts.errors import BadInput, BadUsage
from artifacts.quantisation.widths import USUAL_WIDTHS


def prefix_split(loss: np.ndarray, avg_bits: float) -> list[int]:
    """Return the bits of experts in falling importance, from their `loss` [E, 4] at 1, 2, 3 and 4
    bits.

    The first n4 experts get 4 bits, the next n3 three, the next n2 two, the rest one. Of all splits
    of this form that spend exactly `floor(E (avg_bits - 1))` bits beyond the first, the one that
    lowers the summed loss most is returned. Of equals it is the one with the fewest experts at 4
    bits, then at 3. O(E^2). Raises BadUsage where the average is not between 1 and 4, BadInput
    where a loss is missing. (Context-aware MoE inference on CXL-NDP, its prefix allocation.)
    """
    loss = _finite(loss)
    num_experts = len(loss)
    extra = _extra_bits(num_experts, avg_bits)
    # Summed gains of the first n experts from each width over the width below; a split is the ends
    # of three runs.
    to_2, to_3, to_4 = (
        np.append(0, np.cumsum(loss[:, width] - loss[:, width + 1])) for width in range(3)
    )
    end_4, end_3 = np.ogrid[: num_experts + 1, : num_experts + 1]
    end_2 = extra - end_4 - end_3
    is_split = (end_4 <= end_3) & (end_3 <= end_2) & (end_2 <= num_experts)
    gain = np.where(is_split, to_4[:, None] + to_3 + to_2[np.clip(end_2, 0, num_experts)], -np.inf)
    first, second = divmod(int(gain.argmax()), num_experts + 1)
    ends = np.array([first, second, extra - first - second])
    return (1 + (np.arange(num_experts)[:, None] < ends).sum(1)).tolist()


def greedy_columns(
    cost: np.ndarray, nbytes: np.ndarray | Sequence[int], budget_nbytes: int
) -> np.ndarray:
    """Columns [N] of the widths of N replicas whose bytes fit the budget, from the cost of each
    width: `cost` [N, W].

    `nbytes` [W] or [N, W] rise with the width. All replicas start at the narrowest; then the step
    that saves most cost per byte is taken, again and again. The steps of a row follow its lower
    convex hull, so a row may skip a width that is worse than a mix of its neighbours: until a step
    does not fit, no choice of as many bytes costs less. Rows whose next step does not fit stay,
    others go on. Where all replicas at one width cost less and fit, that is the answer. Raises
    BadUsage where not even the narrowest fit.
    """
    cost = _finite(cost)
    nbytes = np.broadcast_to(np.asarray(nbytes, np.int64), cost.shape)
    least = int(nbytes[:, 0].sum())
    left = budget_nbytes - least
    if left < 0:
        raise BadUsage(
            f"all at the narrowest width take {least} bytes, above the budget of "
            f"{budget_nbytes}: raise it"
        )
    level = [0] * len(cost)
    for row, start, target, price in _steps(cost, nbytes):
        if level[row] == start and price <= left:
            level[row] = target
            left = left - price
    return _best_of([np.array(level, int)] + _uniform(nbytes, budget_nbytes), cost)


def _extra_bits(num_experts: int, avg_bits: float) -> int:
    if not 1 <= avg_bits <= USUAL_WIDTHS[-1]:
        raise BadUsage(f"average bits {avg_bits}: give a number from 1 to 4")
    return math.floor(num_experts * (avg_bits - 1))


def _finite(loss: np.ndarray) -> np.ndarray:
    loss = np.asarray(loss, float)
    if not np.isfinite(loss).all():
        raise BadInput("the loss table has gaps: quantise every expert at every width")
    return loss


def _steps(cost: np.ndarray, nbytes: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
    """Yield (row, from, to, bytes) along the lower hull of every row, in falling order of savings
    per byte."""
    rows = np.arange(len(cost))
    level = np.zeros(len(cost), int)
    lowest = np.full(len(cost), np.inf)
    parts = []
    for _ in range(cost.shape[1] - 1):
        added = nbytes - nbytes[rows, level][:, None]
        gains = np.divide(
            cost[rows, level][:, None] - cost,
            added,
            out=np.full(cost.shape, -np.inf),
            where=added > 0,
        )
        target = gains.argmax(1)
        # Gains fall along a hull; rounding errors must not put a row's second step before its
        # first.
        lowest = np.minimum(gains.max(1), lowest)
        steps = np.stack([rows, level, target, added[rows, target]])[:, lowest > 0]
        parts.append((lowest[lowest > 0], steps))
        level = target
    if not parts:  # of one width
        return
    gains, steps = (np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
    yield from zip(*steps[:, np.lexsort((steps[1], steps[0], -gains))].tolist(), strict=True)


def _uniform(nbytes: np.ndarray, budget_nbytes: int) -> list[np.ndarray]:
    """One choice for each width at which all replicas fit."""
    return [
        np.full(len(nbytes), level)
        for level, total in enumerate(nbytes.sum(0))
        if total <= budget_nbytes
    ]


def _best_of(choices: Sequence[np.ndarray], cost: np.ndarray) -> np.ndarray:
    return min(choices, key=lambda level: cost[np.arange(len(cost)), level].sum())
