"""Greedy continuations of many texts, several at a time, until a stop sequence appears."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from runtime.session.generation.round_robin import open_batch
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session


@dataclass(slots=True)
class Continued:
    """A text to continue: its tokens [1, S], what ends it, and the tokens that were generated."""

    ids: torch.Tensor
    until: Sequence[str]
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)


def continued(session: Session, texts: Sequence[Continued], *, rows: int) -> None:
    """Continue all texts greedily, `rows` at a time, and leave the tokens in them. Raises BadInput
    for a text that the model cannot take or continue."""
    with open_batch(session, rows=rows) as batch:
        under_way = {batch.add(text.ids, Sampling(text.max_new_tokens)): text for text in texts}
        while not batch.is_idle:
            for result in batch.step():
                if result.error:
                    raise result.error
                if result.token_id is None:
                    continue
                text = under_way[result.request]
                text.tokens.append(result.token_id)
                if not result.is_over and _has_ended(session, text):
                    batch.cancel(result.request)


def _has_ended(session: Session, text: Continued) -> bool:
    """Return whether a stop sequence stands among the last tokens. Each token is at least a byte,
    so the longest sequence has at most as many tokens as bytes."""
    longest = max((len(term.encode()) for term in text.until), default=0)
    end = session.opened.tokenizer.decode(text.tokens[-longest - 1 :])
    return any(term in end for term in text.until if term)
