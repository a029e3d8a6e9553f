"""Token sequences as padded batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from artifacts.errors import BadUsage
from runtime.session.generate import check_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """Token sequences that go through the model together; the first of them is request `first` of the whole data."""

    first: int
    sequences: tuple[np.ndarray, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))


@dataclass(frozen=True, slots=True)
class Batching:
    """How text goes through the model: `batch` sequences of at most `length` tokens, each beginning with a
    prompt of `prefill`.

    Shard `index` of `count` takes every `count`-th batch, so that batches, and with them every rounding, are the same
    however the work is divided.
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
            raise BadUsage(f"shard {self.index + 1}/{self.count} does not exist: write i/N with 1 <= i <= N")

    def batches(self, sequences: Sequence[np.ndarray]) -> list[Batch]:
        """This shard's batches, in order."""
        starts = range(0, len(sequences), self.batch)[self.index :: self.count]
        return [Batch(start, tuple(sequences[start : start + self.batch])) for start in starts]


def padded(sequences: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ids and mask [B, S] of sequences of unequal length, padded on the right; no mask when nothing is padded."""
    longest = max(map(len, sequences))
    ids = np.zeros((len(sequences), longest), np.int64)
    mask = np.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    return torch.from_numpy(ids), None if mask.all() else torch.from_numpy(mask)


def real_rows(ids: torch.Tensor, mask: torch.Tensor | None) -> np.ndarray:
    """[B * S] bool: which rows of a flattened batch are tokens and not padding."""
    return np.ones(ids.numel(), bool) if mask is None else mask.numpy().astype(bool).ravel()


def check_sequences(model: PreTrainedModel, sequences: Sequence[np.ndarray]) -> None:
    """Raise BadInput when the model cannot read these sequences: ids it does not know, too many tokens."""
    longest = max(map(len, sequences))
    highest = max(int(sequence.max()) for sequence in sequences)
    check_tokens(model, highest=highest, length=longest, what=f"sequences of {longest} tokens")


@dataclass(frozen=True, slots=True)
class Data:
    """Text as the profile saw it: what the user named, and the token sequences it became."""

    spec: str
    sequences: Sequence[np.ndarray]
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))
