"""What replicas of a model's experts take and what they lose, as policies and budgets want to know it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from artifacts.errors import BadUsage, Incompatible
from artifacts.quantisation.bit_allocation import WIDTHS
from artifacts.shape import FULL_BITS

BASES = (FULL_BITS, 4, 3, 2)  # below 1 bit there would be nothing left to stand in
_BORDER = 16  # bytes

# Medians of 256 experts of a small trained model, GPTQ in groups of 32, held-out tokens.
_TYPICAL_RELATIVE_LOSS = np.array([0.139, 0.0222, 0.0037, 0.0008])
_TYPICAL_GROUP = 128
_SCALE_BITS = 16


def check_base(bits: int) -> None:
    """Raise BadUsage unless experts' own form can be of so many bits."""
    if bits not in BASES:
        stored = ", ".join(map(str, BASES[1:]))
        raise BadUsage(f"--base {bits} is none: {FULL_BITS} is the checkpoint as it is, {stored} are stored replicas")


@dataclass(frozen=True, slots=True)
class Replicas:
    """`nbytes`: bytes of one expert in memory by bits, `FULL_BITS` among them; L layers of E experts. `base`: how many
    bits those of `FULL_BITS` really are.

    `loss` [L, E, 4]: mean squared error of an expert's output at 1, 2, 3, 4 bits.
    `use` [L, E]: squared routing weights, summed over tokens, in any unit. `lost` [L, E, 4]: what the model loses by
    it, loss times use, and passed on by the layers that follow. NaN where nothing was built. `files`: by key, where the
    replicas lie, and `hashes` of what was written there; none for a model that is only simulated.
    """

    nbytes: Mapping[int, int]
    loss: np.ndarray
    lost: np.ndarray
    use: np.ndarray
    files: tuple[Path, ...] = ()
    hashes: tuple[str, ...] = ()
    base: int = FULL_BITS

    @property
    def widths(self) -> list[int]:
        """Bits below the full precision at which every expert can be had, ascending."""
        return sorted(self.nbytes.keys() - {FULL_BITS})

    def on_base(self, bits: int) -> "Replicas":
        """The same where the experts' own form is their replica of so many bits: only what is narrower is a replica.

        Errors of two widths hardly go together, so that their squares add up: docs/lowbit.md. Raises Incompatible where
        there is no such replica.
        """
        if bits not in self.widths:
            raise Incompatible(f"no replicas of {bits} bits are stored: run `moectl quantize --bits {bits}`")
        nbytes = {FULL_BITS: self.nbytes[bits]} | {width: self.nbytes[width] for width in self.widths if width < bits}
        loss, lost = (_from_base(table, bits) for table in (self.loss, self.lost))
        return replace(self, nbytes=nbytes, loss=loss, lost=lost, base=bits)


def _from_base(table: np.ndarray, bits: int) -> np.ndarray:
    """[L, E, 4] what is lost from replicas of so many bits on: nothing at their own width, NaN above it."""
    found = np.where(np.array(WIDTHS) < bits, table + table[..., bits - 1, None], np.nan)
    found[..., bits - 1] = 0.0
    return found


def in_memory(nbytes: int) -> int:
    """The room that a replica of so many bytes takes: replicas begin on borders of 16 bytes."""
    return -(-nbytes // _BORDER) * _BORDER


def passed_on(num_layers: int) -> np.ndarray:
    """[L, 1, 1] how much an error counts by its layer: those that follow add to it, so the first counts twice the last.

    Measured on two small models, a layer at a time at 1 and at 2 bits: docs/quantisation.md.
    """
    return np.linspace(2, 1, num_layers)[:, None, None]


def typical(use: np.ndarray, *, expert_nbytes: int, weight_nbytes: float = 2.0) -> Replicas:
    """Replicas of a model that nobody has quantised: sizes in groups of 128, losses as measured on a small model."""
    num_weights = expert_nbytes / weight_nbytes
    nbytes = {bits: in_memory(round(num_weights * _bits_a_weight(bits) / 8)) for bits in WIDTHS}
    loss = np.tile(_TYPICAL_RELATIVE_LOSS, (*use.shape, 1))
    return Replicas({FULL_BITS: expert_nbytes} | nbytes, loss, loss * use[:, :, None] * passed_on(len(use)), use)


def _bits_a_weight(bits: int) -> float:
    """With the scale of its group, and its zero-point, which 1 bit does without."""
    zero = bits if bits > 1 else 0
    return bits + (_SCALE_BITS + zero) / _TYPICAL_GROUP
