"""A low-bit replica of every expert stays in the fast tier, so that no miss ever stalls
(moectl)."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.quantisation.bit_allocation import greedy_columns, prefix_split
from artifacts.quantisation.replicas import Replicas, resident_nbytes
from artifacts.quantisation.widths import (
    MADE_WIDTHS,
    NOTHING,
    USUAL_WIDTHS,
    Width,
    as_width,
    columns_of,
)
from artifacts.shape import FULL_BITS, Shape
from runtime.policies.base import Artefacts, FastTier, SimpleResidency
from runtime.policies.shared.misses import check_replicas

_CHOICES = ("mixed", "pruned", "uniform", "prefix", "random", *map(str, MADE_WIDTHS))


@dataclass
class ShadowResidency(SimpleResidency):
    """`bits` is one width for all experts, `uniform` the largest width that fits the budget, or
    `mixed`: chosen over all layers together by the greatest marginal gain of loss times use per
    byte. `pruned` is `mixed` with one width more: experts that cost least by it have no replica and
    are left out, for the good of the others. There are also `prefix`, the prefix split of every
    layer by calibrated use at the largest average that fits, and `random`, the widths of `mixed`
    shuffled by `seed`.

    The rest of the budget holds experts at full precision, unless `slots` is no or there is less
    than one for a layer: so few gain nothing, and with any every layer has to be decided.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"replicas"})

    bits: str = "mixed"
    slots: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in _CHOICES:
            raise BadUsage(f"shadow: bits is one of {', '.join(_CHOICES)}, not {self.bits!r}")

    @property
    def named_widths(self) -> tuple[Width, ...]:
        return tuple(width for width in MADE_WIDTHS if self.bits == str(width))

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._replicas = artefacts.replicas
        self._shape = shape
        if self.bits == "prefix":
            check_replicas("shadow:bits=prefix", artefacts, *USUAL_WIDTHS)
        check_replicas("shadow", artefacts, *self.named_widths)
        made = [*self.named_widths] or artefacts.replicas.widths
        self._widths = np.array([NOTHING, *made] if self.bits == "pruned" else made)
        nbytes = {NOTHING: 0, **artefacts.replicas.nbytes}
        self._nbytes = np.array([nbytes[bits] for bits in self._widths.tolist()])

    def share(self, budget_nbytes: int) -> FastTier:
        """Divide the budget. Raises BadUsage when it does not hold the narrowest replica of every
        expert."""
        narrowest = next(as_width(bits) for bits in self._widths if bits != NOTHING)
        least = self._replicas.nbytes[narrowest] * self._shape.num_keys
        if least > budget_nbytes:
            percent = 100 * least / self._shape.nbytes
            raise BadUsage(
                f"the budget of {budget_nbytes:,} bytes does not hold a replica of every expert at "
                f"{narrowest} bits: give at least {least:,} bytes ({percent:.1f}%)"
            )
        bits = self._widths[self._columns(budget_nbytes)]
        left = budget_nbytes - resident_nbytes(self._replicas.nbytes, bits.tolist())
        num_slots = (
            min(left // self._replicas.nbytes[FULL_BITS], self._shape.num_keys) if self.slots else 0
        )
        return FastTier(num_slots if num_slots >= self._shape.num_layers else 0, bits)

    def _columns(self, budget_nbytes: int) -> np.ndarray:
        """Return [L * E] the column of each expert's width."""
        num_keys = self._shape.num_keys
        if self.bits == "prefix":
            return self._prefix(budget_nbytes)
        if self.bits == "pruned":
            budget_nbytes -= int(self._nbytes[1])  # of zeros, which all that are left out share
        elif self.bits not in ("mixed", "random"):
            return np.full(num_keys, np.flatnonzero(self._nbytes * num_keys <= budget_nbytes)[-1])
        lost = self._replicas.lost.reshape(num_keys, -1)[:, columns_of(self._widths)]
        chosen = greedy_columns(lost, self._nbytes, budget_nbytes)
        return (
            chosen
            if self.bits != "random"
            else np.random.default_rng(self.seed).permutation(chosen)
        )

    def _prefix(self, budget_nbytes: int) -> np.ndarray:
        """Return the prefix split at the largest average that fits, in steps of one bit of one
        expert a layer."""
        num_experts = self._shape.num_experts
        steps = range((USUAL_WIDTHS[-1] - 1) * num_experts + 1)
        fitting = bisect_right(
            steps, budget_nbytes, key=lambda step: int(self._nbytes[self._split(step)].sum())
        )
        return self._split(steps[fitting - 1])

    def _split(self, num_extra: int) -> np.ndarray:
        """Return [L * E] columns for layers with `num_extra` bits beyond the first of each
        expert."""
        return np.searchsorted(
            self._widths, prefix_bits(self._replicas, 1 + num_extra / self._shape.num_experts)
        )


def prefix_bits(replicas: Replicas, avg_bits: float) -> np.ndarray:
    """Return [L * E] bits by the prefix split of every layer, its experts in falling order of
    use."""
    bits = np.zeros(replicas.use.shape, np.int64)
    for layer, (use, loss) in enumerate(zip(replicas.use, replicas.loss, strict=True)):
        order = np.argsort(-use, kind="stable")
        bits[layer, order] = prefix_split(loss[order][:, columns_of(USUAL_WIDTHS)], avg_bits)
    return bits.reshape(-1)
