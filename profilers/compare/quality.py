"""Measures quality and speed of a session on held-out text: teacher-forced decoding, compared with
the full model."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional as F

from runtime.devices import wait_for_compute
from runtime.session.session import Session


@dataclass(frozen=True, slots=True)
class TextReading:
    """The result of reading held-out text: N scored positions over a vocabulary of V.

    `logits` are [N, V] float32, `targets` [N] the text's next tokens. `prefill_s` are the seconds
    of each prompt, `decode_s` of each decoded token; `stall_s` is the part of these that waited for
    the link.
    """

    logits: torch.Tensor
    targets: torch.Tensor
    prefill_s: tuple[float, ...]
    decode_s: tuple[float, ...]
    stall_s: tuple[float, ...]

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood, nats per token."""
        return F.cross_entropy(self.logits, self.targets).item()


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality against the full model on the same text: perplexity ratio, mean KL divergence in
    nats, the share of positions with the same most probable token, and the standard error of the
    ratio."""

    perplexity_ratio: float
    kl: float
    top1_agreement: float
    loss_error: float


def read(
    session: Session,
    sequences: Sequence[np.ndarray],
    *,
    prefill: int,
    progress: Callable[[int], None] = lambda decoded: None,
    clock: Callable[[], float] = time.perf_counter,
) -> TextReading:
    """Give the session the first `prefill` tokens of each sequence as a prompt, then the rest one
    by one.

    Only decode steps are scored: they correspond to the text that a user would read. Times are
    by `clock`, in seconds. Raises NotFinite for logits that are no numbers.
    """
    stall_s = []

    def decoded(count: int) -> None:
        stall_s.append(session.engine.stall_s[-1])
        progress(count)

    reading = read_by(
        lambda ids, past: session.forward(ids, past=past),
        sequences,
        prefill=prefill,
        device=session.opened.model.device,
        begin=session.new_requests,
        decoded=decoded,
        clock=clock,
    )
    session.check_logits(torch.from_numpy(sequences[0])[None], reading.logits)
    return replace(reading, stall_s=tuple(stall_s))


def read_by(
    forward: Callable[[torch.Tensor, object], object],
    sequences: Sequence[np.ndarray],
    *,
    prefill: int,
    device: torch.device,
    begin: Callable[[int], None] = lambda requests: None,
    decoded: Callable[[int], None] = lambda count: None,
    clock: Callable[[], float] = time.perf_counter,
) -> TextReading:
    """Read the text with any model: `forward(ids, past)` returns `logits` and `past_key_values`.
    `begin` is called for every new request, `decoded` with the number of decoded tokens so far.
    `stall_s` is zero."""
    logits = []
    prefill_s = []
    decode_s = []
    for sequence in sequences:
        ids = torch.from_numpy(sequence)[None].to(device)
        begin(1)
        output, seconds = _timed(forward, ids[:, :prefill], None, clock)
        prefill_s.append(seconds)
        for position in range(prefill, ids.shape[1]):
            logits.append(output.logits[0, -1].float().cpu())
            output, seconds = _timed(
                forward, ids[:, position : position + 1], output.past_key_values, clock
            )
            decode_s.append(seconds)
            decoded(len(decode_s))
    targets = torch.from_numpy(np.concatenate([sequence[prefill:] for sequence in sequences]))
    return TextReading(
        torch.stack(logits), targets, tuple(prefill_s), tuple(decode_s), (0.0,) * len(decode_s)
    )


def compare(reading: TextReading, full: TextReading) -> Quality:
    """Compare a reading with the full model's reading of the same text."""
    mine, theirs = (F.log_softmax(r.logits, dim=-1) for r in (reading, full))
    ratio = float(np.exp(reading.nll - full.nll))
    kl = F.kl_div(mine, theirs, log_target=True, reduction="batchmean")
    return Quality(
        perplexity_ratio=ratio,
        kl=kl.item(),
        top1_agreement=(mine.argmax(-1) == theirs.argmax(-1)).float().mean().item(),
        loss_error=paired_error(lost_by_token(mine, theirs, full.targets), ratio, kl.item()),
    )


def paired_error(lost: torch.Tensor, ratio: float, kl: float) -> float:
    """Return the standard error of a perplexity ratio from the loss of each scored token, nats [N].
    Readings are paired by token, so that text that both find hard does not count."""
    return ratio * standard_error(lost) if len(lost) > 1 else expected_error(ratio, kl, 1)


def standard_error(lost: torch.Tensor) -> float:
    """Return the standard error of the mean loss of tokens [N], nats; NaN of a single one."""
    return lost.double().std().item() / len(lost) ** 0.5


def expected_error(ratio: float, kl: float, num_scored: int) -> float:
    """Return an estimate of `paired_error` where only the mean KL divergence of `num_scored` tokens
    is known."""
    return ratio * (2 * max(kl, 0.0) / num_scored) ** 0.5


def losses_by_text(
    reading: TextReading, full: TextReading, *, num_texts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return KL divergence and loss of log-likelihood of each text [num_texts], in nats per scored
    token, against the full model. Texts have equal length."""
    mine, theirs = (F.log_softmax(r.logits, dim=-1) for r in (reading, full))
    kl = F.kl_div(mine, theirs, log_target=True, reduction="none").sum(-1)
    lost = lost_by_token(mine, theirs, full.targets)
    kl_by_text, loss_by_text = (
        values.reshape(num_texts, -1).double().mean(1).numpy() for values in (kl, lost)
    )
    return kl_by_text, loss_by_text


def lost_by_token(mine: torch.Tensor, theirs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the nats that each token [N] is less probable by, from log probabilities [N, V]."""
    return (theirs - mine).gather(1, targets[:, None])[:, 0]


def _timed(
    forward: Callable[[torch.Tensor, object], object],
    ids: torch.Tensor,
    past: object,
    clock: Callable[[], float],
) -> tuple[object, float]:
    begin_s = clock()
    output = forward(ids, past)
    wait_for_compute(ids.device)
    return output, clock() - begin_s
