"""A low-bit replica of every expert stays in the fast tier, so that no miss ever stalls (moectl)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.bitwidths import WIDTHS, greedy_bits
from artifacts.errors import BadUsage
from artifacts.replicas import FULL_BITS
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, FastTier, SimpleResidency
from runtime.policies.miss.precision import check_replicas

_CHOICES = ("mixed", "uniform", *map(str, WIDTHS))


@dataclass
class ShadowResidency(SimpleResidency):
    """`bits` is one width for all, `uniform` the largest that fits the budget, or `mixed`: chosen over all layers
    together by the greatest marginal gain of loss times use per byte.

    What the replicas leave of the budget holds experts at full precision, unless `slots` is no.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"replicas"})

    bits: str = "mixed"
    slots: bool = True

    def __post_init__(self) -> None:
        if self.bits not in _CHOICES:
            raise BadUsage(f"shadow: bits is one of {', '.join(_CHOICES)}, not {self.bits!r}")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._replicas, self._shape = artefacts.replicas, shape
        if self.bits not in ("mixed", "uniform"):
            check_replicas("shadow", artefacts, int(self.bits))
        self._widths = [int(self.bits)] if self.bits.isdigit() else self._replicas.widths

    def share(self, budget_nbytes: int) -> FastTier:
        """Raises BadUsage when the budget does not hold the narrowest replica of every expert."""
        nbytes, num_keys = np.array([self._replicas.nbytes[bits] for bits in self._widths]), self._shape.num_keys
        least = int(nbytes[0]) * num_keys
        if least > budget_nbytes:
            raise BadUsage(
                f"the budget of {budget_nbytes:,} bytes does not hold a replica of every expert at {self._widths[0]} "
                f"bits: give at least {least:,} bytes ({100 * least / self._shape.nbytes:.1f}%)"
            )
        if self.bits == "mixed":
            lost = self._replicas.lost.reshape(num_keys, -1)[:, [bits - 1 for bits in self._widths]]
            columns = greedy_bits(lost, nbytes, budget_nbytes) - 1
        else:
            columns = np.full(num_keys, np.flatnonzero(nbytes * num_keys <= budget_nbytes)[-1])
        left = budget_nbytes - int(nbytes[columns].sum())
        num_slots = min(left // self._replicas.nbytes[FULL_BITS], num_keys) if self.slots else 0
        return FastTier(num_slots, np.array(self._widths)[columns])
