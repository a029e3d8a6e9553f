"""Divides token sequences into batches and pads them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from artifacts.errors import BadUsage
from runtime.session.generation.sampling import check_tokens


@dataclass(frozen=True, slots=True)
class Data:
    """Text as it is profiled: the specification that the user gave, and its token sequences.
    `shortfall` says in words by how much they are fewer than were asked for, empty where they are
    not."""

    spec: str
    sequences: Sequence[np.ndarray]
    seed: int = 0
    shortfall: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))


@dataclass(frozen=True, slots=True)
class Batch:
    """Token sequences that the model computes together; the first is request `first` of all the
    data."""

    first: int
    sequences: tuple[np.ndarray, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))


@dataclass(frozen=True, slots=True)
class Batching:
    """Division of sequences into batches: `batch` at a time, each of at most `length` tokens and
    with a prompt of `prefill`.

    Shard `index` of `count` takes every `count`-th batch: the batches, and with them all rounding,
    do not depend on the number of shards.
    """

    batch: int = 16
    length: int = 256
    prefill: int = 64
    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1 or self.length < 2 or self.prefill < 0:
            raise BadUsage("profiling needs batch >= 1, length >= 2 and prefill >= 0")
        if not 0 <= self.index < self.count:
            raise BadUsage(
                f"shard {self.index + 1}/{self.count} does not exist: write i/N with 1 <= i <= N"
            )

    def batches(self, sequences: Sequence[np.ndarray]) -> list[Batch]:
        """Return this shard's batches, in order."""
        starts = range(0, len(sequences), self.batch)[self.index :: self.count]
        return [Batch(start, tuple(sequences[start : start + self.batch])) for start in starts]


def padded(sequences: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ids and mask [B, S] of the sequences, padded on the right; the mask is None when none
    is padded."""
    longest = max(map(len, sequences))
    ids = np.zeros((len(sequences), longest), np.int64)
    mask = np.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    return torch.from_numpy(ids), None if mask.all() else torch.from_numpy(mask)


def real_rows(ids: torch.Tensor, mask: torch.Tensor | None) -> np.ndarray:
    """Return [B * S] bool: which rows of a flattened batch are tokens and not padding."""
    return np.ones(ids.numel(), bool) if mask is None else mask.numpy().astype(bool).ravel()


def check_sequences(model: PreTrainedModel, sequences: Sequence[np.ndarray]) -> None:
    """Raise BadInput for sequences that the model cannot read: unknown token ids or too many
    tokens."""
    longest = max(map(len, sequences))
    highest = max(int(sequence.max()) for sequence in sequences)
    check_tokens(model, highest=highest, length=longest, what=f"sequences of {longest} tokens")
