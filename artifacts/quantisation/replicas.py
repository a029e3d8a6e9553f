"""Size and loss of the replicas of a model's experts, for policies and budgets."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from artifacts.errors import BadUsage, Incompatible
from artifacts.quantisation.widths import (
    BASES,
    NOTHING,
    USUAL_WIDTHS,
    WIDTHS,
    Width,
    column_of,
    columns_of,
    listed,
)
from artifacts.shape import FULL_BITS

NO_BASE = "leave out --base, or take a narrower one"
_ALIGNMENT = 16  # bytes

# Medians of 256 experts of a small trained model, GPTQ in groups of 32, held-out tokens. At 8 bits
# 1/283 of that at 4, as on the bundled model.
_TYPICAL_RELATIVE_LOSS = {1: 0.139, 2: 0.0222, 3: 0.0037, 4: 0.0008, 8: 2.8e-6}
_TYPICAL_GROUP = 128
_SCALE_BITS = 16

# of the logarithms of experts' uses by text of many kinds, on those by text of one
_USE_SLOPE = 0.8
_PRIOR_USE = 0.02  # added to the use of every expert, as a share of its layer's mean


def check_base(bits: int) -> None:
    """Raise BadUsage unless a replica of `bits` bits can take the place of full precision."""
    if bits not in BASES:
        raise BadUsage(
            f"--base {bits} is none: {FULL_BITS} is the checkpoint as it is, {listed(BASES[1:])} "
            "are stored replicas"
        )


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas of L layers of E experts. `nbytes`: bytes of one expert in memory by bits,
    `FULL_BITS` included. `base`: the bits that `FULL_BITS` really stands for. `at_full`: widths
    that full precision serves at no more bytes.

    `loss` [L, E, W]: mean squared error of an expert's output at each of `WIDTHS`. `use` [L, E]:
    squared routing weights, summed over tokens, in any unit. `lost` [L, E, W]: what the model loses
    by it: loss times use, weighted by how far the following layers pass the error on. NaN where no
    replica was built; of `NOTHING` it is the loss of leaving the expert out. `files`: path of each
    key's replicas, and `hashes` of their content; both empty for a model that is only simulated.
    """

    nbytes: Mapping[int, int]
    loss: np.ndarray
    lost: np.ndarray
    use: np.ndarray
    files: tuple[Path, ...] = ()
    hashes: tuple[str, ...] = ()
    base: int = FULL_BITS
    at_full: tuple[int, ...] = ()

    @property
    def widths(self) -> list[int]:
        """Bits below full precision at which every expert has a replica, ascending."""
        return sorted(self.nbytes.keys() - {FULL_BITS})

    def on_base(self, bits: int) -> "Replicas":
        """Return the same with the replica of `bits` bits in the place of full precision: only
        narrower ones remain replicas.

        Errors of two widths are nearly uncorrelated, so their squares add up: docs/lab/lowbit.md.
        Raises Incompatible where that replica is missing or no smaller than full precision.
        """
        if bits in self.at_full:
            raise Incompatible(
                f"replicas of {bits} bits are no smaller than the experts of the checkpoint: "
                f"{NO_BASE}"
            )
        if bits not in self.widths:
            raise Incompatible(
                f"no replicas of {bits} bits are stored: run `moectl quantize --bits {bits}`"
            )
        nbytes = {FULL_BITS: self.nbytes[bits]} | {
            width: self.nbytes[width] for width in self.widths if width < bits
        }
        loss, lost = (_from_base(table, bits) for table in (self.loss, self.lost))
        return replace(self, nbytes=nbytes, loss=loss, lost=lost, base=bits, at_full=(bits,))

    def without_larger(self, *more: int) -> "Replicas":
        """Return the same without widths that take no fewer bytes than full precision, and without
        `more`, which are known to take no fewer. Full precision serves in their place, without
        loss."""
        at_full = sorted(
            {bits for bits in self.widths if self.nbytes[bits] >= self.nbytes[FULL_BITS]} | {*more}
        )
        loss = self.loss.copy()
        lost = self.lost.copy()
        for table in (loss, lost):
            table[..., columns_of(at_full)] = 0.0
        nbytes = {bits: size for bits, size in self.nbytes.items() if bits not in at_full}
        return replace(self, nbytes=nbytes, loss=loss, lost=lost, at_full=tuple(at_full))


def _from_base(table: np.ndarray, bits: int) -> np.ndarray:
    """Return [L, E, W] losses relative to replicas of `bits` bits: 0 at their own width, NaN above
    it."""
    relative = np.where(np.array(WIDTHS) < bits, table + table[..., column_of(bits), None], np.nan)
    relative[..., column_of(bits)] = 0.0
    return relative


def resident_nbytes(nbytes: Mapping[Width, int], bits: Collection[Width]) -> int:
    """Return the bytes of resident replicas of these bits, from the bytes of one replica by its
    bits; all of width `NOTHING` share a narrowest one of zeros."""
    zeros = nbytes[min(nbytes)] if NOTHING in bits else 0
    return zeros + sum(nbytes[width] for width in bits if width != NOTHING)


def in_memory(nbytes: int) -> int:
    """Bytes that a replica occupies: replicas are aligned to 16 bytes."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def passed_on(num_layers: int) -> np.ndarray:
    """[L, 1, 1] weight of an error by its layer: later layers add to it, so the first layer counts
    twice as much as the last.

    Measured on two small models, one layer at a time at 1 and at 2 bits: docs/lab/quantisation.md.
    """
    return np.linspace(2, 1, num_layers)[:, None, None]


def expected_use(use: np.ndarray) -> np.ndarray:
    """Return the use [L, E, ...] that other text is expected to make of experts, in the unit of the
    `use` that calibration text made. Logarithms shrink toward the layer's; the mean use of the
    layer stays.

    Where the logarithms of two texts' uses are jointly normal, the expected use by one is a power
    of the use by the other. The exponent is the slope of their regression (shrinkage to a group's
    mean: Efron and Morris 1975, Data Analysis Using Stein's Estimator). The slope is measured
    between texts, since halves of one text say 1 whatever text it is: docs/lab/quantisation.md.
    """
    mean = use.mean(axis=1, keepdims=True)
    shrunk = (use + _PRIOR_USE * mean) ** _USE_SLOPE
    scale = shrunk.mean(axis=1, keepdims=True)
    return shrunk * np.divide(mean, scale, out=np.zeros_like(mean), where=scale > 0)


def typical(
    use: np.ndarray,
    *,
    expert_nbytes: int,
    weight_nbytes: float = 2.0,
    widths: Collection[int] = USUAL_WIDTHS,
) -> Replicas:
    """Replicas of a model that has none in the store: sizes in groups of 128, losses as measured on
    a small model."""
    num_weights = expert_nbytes / weight_nbytes
    nbytes = {
        bits: in_memory(round(num_weights * _bits_per_weight(bits) / 8)) for bits in sorted(widths)
    }
    loss = np.full((*use.shape, len(WIDTHS)), np.nan)
    loss[..., columns_of(sorted(widths))] = [
        _TYPICAL_RELATIVE_LOSS[bits] for bits in sorted(widths)
    ]
    loss[..., column_of(NOTHING)] = 1.0
    lost = loss * use[:, :, None] * passed_on(len(use))
    return Replicas({FULL_BITS: expert_nbytes} | nbytes, loss, lost, use).without_larger()


def _bits_per_weight(bits: int) -> float:
    """Bits per weight, with the scale of its group and, above 1 bit, the zero-point."""
    zero = bits if bits > 1 else 0
    return bits + (_SCALE_BITS + zero) / _TYPICAL_GROUP
