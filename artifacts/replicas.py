"""What replicas of a model's experts take and what they lose, as policies and budgets want to know it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from artifacts.bitwidths import WIDTHS

FULL_BITS = 16  # the checkpoint's own precision, whatever its dtype
_BORDER = 16  # bytes

# Medians of 256 experts of a small trained model, GPTQ in groups of 32, held-out tokens.
_TYPICAL_RELATIVE_LOSS = np.array([0.139, 0.0222, 0.0037, 0.0008])
_TYPICAL_GROUP = 128
_SCALE_BITS = 16


@dataclass(frozen=True, slots=True)
class Replicas:
    """`nbytes`: bytes of one expert in memory by bits, `FULL_BITS` among them; L layers of E experts.

    `loss` [L, E, 4]: mean squared error of an expert's output at 1, 2, 3, 4 bits.
    `lost` [L, E, 4]: what the model loses by it, loss times use: the squared change of the layer's output summed over
    the calibration tokens, routing weights included, as a share of the layer's own sum. NaN where nothing was built.
    `files`: by key, where the replicas lie; none for a model that is only simulated.
    """

    nbytes: Mapping[int, int]
    loss: np.ndarray
    lost: np.ndarray
    files: tuple[Path, ...] = ()

    @property
    def widths(self) -> list[int]:
        """Bits below the full precision at which every expert can be had, ascending."""
        return sorted(self.nbytes.keys() - {FULL_BITS})


def in_memory(nbytes: int) -> int:
    """The room that a replica of so many bytes takes: replicas begin on borders of 16 bytes."""
    return -(-nbytes // _BORDER) * _BORDER


def typical(num_layers: int, num_experts: int, *, expert_nbytes: int, weight_nbytes: float = 2.0) -> Replicas:
    """Replicas of a model that nobody has quantised: sizes in groups of 128, losses as measured on a small model, all
    experts used alike."""
    num_weights = expert_nbytes / weight_nbytes
    nbytes = {bits: in_memory(round(num_weights * _bits_a_weight(bits) / 8)) for bits in WIDTHS}
    loss = np.tile(_TYPICAL_RELATIVE_LOSS, (num_layers, num_experts, 1))
    return Replicas({FULL_BITS: expert_nbytes} | nbytes, loss, loss / num_experts)


def _bits_a_weight(bits: int) -> float:
    """With the scale of its group, and its zero-point, which 1 bit does without."""
    zero = bits if bits > 1 else 0
    return bits + (_SCALE_BITS + zero) / _TYPICAL_GROUP
