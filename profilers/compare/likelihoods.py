"""Log likelihoods of many continuations: several texts are read in one pass, each attending to
itself alone.

Their tokens lie one after the other without padding, so that routers, caches and counters see the
texts and nothing else, and an expert that is loaded serves all texts of the pass.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional

from runtime.model.rows.attention import attended
from runtime.model.rows.memory import RowMemory
from runtime.model.rows.passes import RowPass, RowPiece, RowWay
from runtime.session.generation.finite import NotFinite
from runtime.session.session import Session

# of a pass: its tokens, and its logits, which take four bytes each
_TOKENS = 2048
_LOGITS = 1 << 26
Likelihood = tuple[float, bool]


@dataclass(slots=True)
class Continuations:
    """Ids of one text, and the continuations that end with its last predictions; `count` of these
    are needed."""

    ids: tuple[int, ...]
    # place among the items, and tokens
    asked: list[tuple[int, Sequence[int]]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return max(len(tokens) for _, tokens in self.asked)


def likelihoods(
    session: Session,
    items: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    rows: int,
    dtype: torch.dtype | None = None,
) -> list[Likelihood]:
    """Return, for items of a context and a continuation in token ids, the log probability of the
    continuation, and whether each of its tokens is the most probable one; in the order of the
    items.

    A pass reads `rows` texts, as long as they are not too many tokens together, and the longest
    texts are read first. A text that several items have in common is read once. Log probabilities
    are taken in `dtype`, by default in the dtype of the logits. Raises what a pass raises, and
    NotFinite for logits that are no numbers.
    """
    answers: list[Likelihood] = [(0.0, False)] * len(items)
    texts = sorted(_texts(items), key=lambda text: -len(text.ids))
    with attended(session.opened.model) as way:
        for together in _passes(
            texts, rows, vocabulary=session.opened.model.config.get_text_config().vocab_size
        ):
            for text, logits in zip(together, _logits(session, together, way), strict=True):
                log_p = functional.log_softmax(logits, dim=-1, dtype=dtype)
                for place, tokens in text.asked:
                    answers[place] = _likelihood(log_p, tokens)
    for text in texts:
        if any(math.isnan(answers[place][0]) for place, _ in text.asked):
            raise session.traced(NotFinite(torch.tensor(text.ids)[None], session.opened.dtype))
    return answers


def _texts(items: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Continuations]:
    """Return the different texts of the items, without their last tokens, after which nothing is
    predicted."""
    texts: dict[tuple[int, ...], Continuations] = {}
    for place, (context, continuation) in enumerate(items):
        ids = (*context, *continuation[:-1])
        texts.setdefault(ids, Continuations(ids)).asked.append((place, continuation))
    return list(texts.values())


def _passes(
    texts: list[Continuations], rows: int, *, vocabulary: int
) -> Iterator[list[Continuations]]:
    together = []
    num_tokens = 0
    num_logits = 0
    for text in texts:
        tokens = len(text.ids)
        logits = text.count * vocabulary
        is_full = (
            len(together) == rows or num_tokens + tokens > _TOKENS or num_logits + logits > _LOGITS
        )
        if together and is_full:
            yield together
            together = []
            num_tokens = 0
            num_logits = 0
        together.append(text)
        num_tokens = num_tokens + tokens
        num_logits = num_logits + logits
    if together:
        yield together


def _logits(session: Session, texts: list[Continuations], way: RowWay) -> Sequence[torch.Tensor]:
    """Read texts in one pass. Returns the logits [count, V] of the last predictions of each."""
    memory = RowMemory()
    lengths = [len(text.ids) for text in texts]
    pieces = [
        RowPiece(memory.begin(length).block, 1, length, torch.zeros(1, dtype=torch.int64))
        for length in lengths
    ]
    session.new_requests(len(texts))
    ends = np.cumsum(lengths).tolist()
    counts = [text.count for text in texts]
    output = session.forward_rows(
        torch.tensor([id_ for text in texts for id_ in text.ids]),
        torch.cat([torch.arange(length) for length in lengths]),
        RowPass(pieces, way),
        requests=session.watcher.first_request
        + np.repeat(np.arange(len(texts), dtype=np.int32), lengths),
        keep=torch.cat(
            [torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        ),
    )
    return output.logits[0].split(counts)


def _likelihood(log_p: torch.Tensor, tokens: Sequence[int]) -> Likelihood:
    wanted = torch.tensor(tokens, device=log_p.device)
    log_p = log_p[-len(tokens) :]
    return float(log_p.gather(1, wanted[:, None]).sum()), bool(
        (log_p.argmax(dim=-1) == wanted).all()
    )
