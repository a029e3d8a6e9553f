"""Measures answers with drafts beside the same answers without."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session


@dataclass(frozen=True, slots=True)
class Answers:
    """Greedy answers to some prompts: milliseconds of a token behind the first, by prompt, and
    those tokens, their passes and what became of drafts over all prompts."""

    tpot_ms: tuple[float, ...]
    tokens: int
    passes: int
    drafted: int
    accepted: int

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes


@dataclass(frozen=True, slots=True)
class DraftedPairs:
    """The same answers without drafts and with them."""

    plain: Answers
    drafted: Answers

    @property
    def ratios(self) -> tuple[float, ...]:
        """The time of a token with drafts over that without, by prompt."""
        pairs = zip(self.drafted.tpot_ms, self.plain.tpot_ms, strict=True)
        return tuple(drafted / plain for drafted, plain in pairs)


def answers(session: Session, prompts: Sequence[np.ndarray], num_tokens: int) -> Answers:
    """Answer each prompt [S] by `num_tokens` tokens behind the first, after the first prompt has
    warmed the cache."""
    _answer_ms(session, prompts[0], num_tokens)
    first_pass = session.num_passes
    tpot_ms = [_answer_ms(session, prompt, num_tokens) for prompt in prompts]
    counted = session.effort(first_pass=first_pass).counters
    return Answers(
        tuple(tpot_ms),
        tokens=num_tokens * len(prompts),
        passes=session.num_passes - first_pass - len(prompts),
        drafted=counted["drafted"],
        accepted=counted["accepted"],
    )


def _answer_ms(session: Session, prompt: np.ndarray, num_tokens: int) -> float:
    sampling = Sampling(num_tokens + 1, ignore_eos=True)
    generation = session.begin(torch.from_numpy(prompt)[None], sampling)
    session.step(generation)
    begin_s = perf_counter()
    while not generation.is_over:
        session.step(generation)
    return 1e3 * (perf_counter() - begin_s) / num_tokens
