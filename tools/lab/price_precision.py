"""Prices precisions: measures how much worse a model reads held-out text when all its experts are
at few bits.

Sequences are read teacher-forced in one pass. Every expert is computed on its replica and none at
full precision, so the perplexity ratio is the price of the replicas alone. Decoding token by token
gives the same, up to rounding.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from artifacts.quantisation.replicas import Replicas
from artifacts.quantisation.widths import USUAL_WIDTHS
from profilers.compare.quality import lost_by_token, paired_error
from profilers.text.batches import check_sequences, padded
from runtime.control.build import check_required
from runtime.model.open import MoeModel
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.residency.shadow import prefix_bits
from runtime.policies.shared.misses import check_replicas
from runtime.session.session import Session, Settings

AVERAGES = (3.0, 2.5, 2.0, 1.75, 1.5)
PRESET = "uniform-bits"


@dataclass(frozen=True, slots=True)
class BitAssignment:
    """Bits for every expert, `avg_bits` on average, as the policy `residency` assigns them within
    `budget_nbytes`."""

    name: str
    avg_bits: float
    residency: str
    budget_nbytes: int

    @property
    def settings(self) -> Settings:
        return Settings(PRESET, {"residency": self.residency}, budget=f"{self.budget_nbytes}")


@dataclass(frozen=True, slots=True)
class PrecisionPrice:
    """The quality of one assignment against the full model on the same text: `kl` in nats,
    `loss_error` the standard error of the ratio. `nbytes` is the size of the replicas in memory."""

    nbytes: int
    perplexity_ratio: float
    kl: float
    top1_agreement: float
    loss_error: float


def check_widths(artefacts: Artefacts) -> None:
    """Raise Incompatible when replicas are missing, or some of the widths that are smaller than the
    checkpoint."""
    check_required(build(Settings(PRESET).texts()), artefacts)
    at_full = artefacts.replicas.at_full
    check_replicas(
        "inspect precision", artefacts, *(bits for bits in USUAL_WIDTHS if bits not in at_full)
    )


def assignments(replicas: Replicas, *, draws: int, seed: int) -> list[BitAssignment]:
    """Return the uniform widths; then, for each average below the widest, the greedy assignment,
    the prefix split and `draws` random ones, all within the bytes of the prefix split.

    A uniform width has its own bytes. A split of the same average takes a little less if it has
    experts at 1 bit, which have no zero-points. Where a width is left out because the checkpoint is
    no larger, there is no prefix split, and an average has the bytes of experts of the widths
    beside it.
    """
    num_keys = replicas.use.size
    widths = replicas.widths
    is_split = {*USUAL_WIDTHS} <= {*widths}
    all_assignments = [
        BitAssignment(
            "uniform", float(bits), f"shadow:bits={bits},slots=no", num_keys * replicas.nbytes[bits]
        )
        for bits in reversed(widths)
    ]
    for average in (average for average in AVERAGES if average < widths[-1]):
        nbytes = _budget(replicas, average, is_split=is_split)
        for name in ("mixed", "prefix") if is_split else ("mixed",):
            all_assignments.append(
                BitAssignment(name, average, f"shadow:bits={name},slots=no", nbytes)
            )
        for draw in range(draws):
            residency = f"shadow:bits=random,slots=no,seed={seed + draw}"
            all_assignments.append(BitAssignment("random", average, residency, nbytes))
    return all_assignments


def _budget(replicas: Replicas, average: float, *, is_split: bool) -> int:
    if is_split:
        return sum(replicas.nbytes[bits] for bits in prefix_bits(replicas, average).tolist())
    num_keys = replicas.use.size
    narrower = math.floor(average)
    num_wider = round(num_keys * (average - narrower))
    return (num_keys - num_wider) * replicas.nbytes[narrower] + num_wider * replicas.nbytes[
        math.ceil(average)
    ]


class Precision:
    """Prices assignments on `sequences`, a batch at a time. Raises BadInput for text that the model
    cannot read."""

    def __init__(
        self,
        opened: MoeModel,
        artefacts: Artefacts,
        sequences: Sequence[np.ndarray],
        *,
        batch: int = 8,
    ) -> None:
        check_sequences(opened.model, sequences)
        self._opened = opened
        self._artefacts = artefacts
        self._batch = batch
        # sequences of similar length need little padding
        self._sequences = sorted(sequences, key=len)
        self._num_scored = sum(len(sequence) - 1 for sequence in sequences)
        with Session(opened, Settings("full")) as session:
            # Kept in the model's own precision: in float32 they would be the largest object in
            # memory.
            self._full = [logits.clone() for logits, _ in self._read(session)]
        nll = sum(
            F.cross_entropy(logits.float(), _targets(sequence), reduction="sum").item()
            for logits, sequence in zip(self._full, self._sequences, strict=True)
        )
        self._full_nll = nll / self._num_scored

    @property
    def perplexity(self) -> float:
        """Perplexity of the full model over every position but the first of each sequence."""
        return math.exp(self._full_nll)

    def price(self, assignment: BitAssignment) -> PrecisionPrice:
        """Return the price of an assignment. Raises BadInput for a damaged replica file."""
        nll = kl = 0.0
        num_same = 0
        lost = []
        with Session(self._opened, assignment.settings, artefacts=self._artefacts) as session:
            nbytes = session.receipt()["fast_bytes"]
            for full, (logits, targets) in zip(self._full, self._read(session), strict=True):
                mine = logits.float().log_softmax(-1)
                theirs = full.float().log_softmax(-1)
                nll += F.nll_loss(mine, targets, reduction="sum").item()
                kl += F.kl_div(mine, theirs, log_target=True, reduction="sum").item()
                num_same += int((mine.argmax(-1) == theirs.argmax(-1)).sum())
                lost.append(lost_by_token(mine, theirs, targets))
        count = self._num_scored
        ratio = math.exp(nll / count - self._full_nll)
        error = paired_error(torch.cat(lost), ratio, kl / count)
        return PrecisionPrice(nbytes, ratio, kl / count, num_same / count, error)

    def _read(self, session: Session) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield for each sequence of T tokens the logits [T - 1, V] and the targets [T - 1] of its
        next tokens. Raises NotFinite."""
        for start in range(0, len(self._sequences), self._batch):
            rows = self._sequences[start : start + self._batch]
            ids, mask = padded(rows)
            session.new_requests(len(rows))
            logits = session.forward(ids, mask=mask).logits.cpu()
            for row, sequence in zip(logits, rows, strict=True):
                own = row[: len(sequence) - 1]
                session.check_logits(torch.from_numpy(sequence)[None], own)
                yield own, _targets(sequence)


def _targets(sequence: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(sequence[1:])
