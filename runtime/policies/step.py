"""The step that policies decide on: what a router chose and predicted, and what is known before the
first one.

Shapes: T tokens, R requests, K selected per token, E experts a layer, D prefetch distances, H the
model's width.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np

from artifacts.traces.trace import PREFILL


@dataclass(slots=True)
class Now:
    """The current step. Steps, passes and tokens are counted over the whole run, the current step
    included."""

    step: int = -1
    pass_index: int = -1
    layer: int = 0
    num_tokens: int = 0
    # Keys of the layer that are still to be served and may be evicted before they are: none while a
    # step is pinned.
    unserved: AbstractSet[int] = frozenset()


@dataclass(slots=True)
class Step:
    """One MoE layer in one pass, as its router left it. `phase` is PREFILL when any of its tokens
    is of a prompt. It is never changed after it is made; a frozen dataclass would take three times
    as long to make."""

    pass_index: int
    phase: int
    layer: int
    selected: np.ndarray  # [T, K] expert ids, rank 0 the strongest
    weights: np.ndarray  # [T, K] float32 routing weights as the model applies them
    probabilities: np.ndarray | None = None  # [T, E] float32, the router's softmax
    # [T, D, E] float32: distributions of the routers of the next D layers for this router's input;
    # the K experts that a router would select there have its largest values
    predicted: np.ndarray | None = None
    # [R] rows of the last token of each request; only these predict layers of the next pass
    last: np.ndarray | None = None
    # [T, D, E] float32: what fitted predictors give for those layers
    learned: np.ndarray | None = None
    # [R, H] float32: each request's input of this pass, the mean over its tokens
    embedding: np.ndarray | None = None
    # [T] the request of each token, whose tokens stand together; None: not known
    requests: np.ndarray | None = None
    # [T] bool: which are of prompts, where others are decoded in the same pass
    prompts: np.ndarray | None = None
    # [T] bool: which are drafts, read before it is known whether they stay; None: none
    drafted: np.ndarray | None = None
    # [T, L, K] expert ids that the routers of all layers chose for each token while it was drafted,
    # -1 where that is not known; None: of no token
    foretold: np.ndarray | None = None

    @property
    def decodes(self) -> bool:
        """True if any of its tokens is decoded."""
        return self.phase != PREFILL or self.prompts is not None

    def part(self, rows: np.ndarray, phase: int) -> "Step":
        """Return the step of these tokens [T] bool alone, which are of one phase."""
        of_tokens = ("selected", "weights", "probabilities", "predicted", "learned", "requests")
        of_tokens += ("drafted", "foretold")
        taken = {
            name: None if (all_rows := getattr(self, name)) is None else all_rows[rows]
            for name in of_tokens
        }
        last = None if self.requests is None else last_tokens(taken["requests"])
        embedding = None if self.embedding is None else self.embedding[rows[self.last]]
        return replace(self, **taken, phase=phase, last=last, embedding=embedding, prompts=None)

    @property
    def foreseen(self) -> np.ndarray | None:
        """[T, D, E] the best prediction of the layers ahead."""
        return self.predicted if self.learned is None else self.learned

    @property
    def shares(self) -> np.ndarray:
        """[T, K] routing weights renormalised over the selected (p~)."""
        return self.weights / self.weights.sum(axis=1, keepdims=True)


@dataclass(frozen=True, slots=True)
class Opening:
    """One pass before its first layer has run."""

    pass_index: int
    phase: int
    # [R, H] float32: each request's input of this pass, the mean over its tokens
    embedding: np.ndarray | None
    foretold: np.ndarray | None = None  # as in its steps


_FIRST = np.zeros(1, np.int64)


def last_tokens(requests: np.ndarray) -> np.ndarray:
    """Return the row of the last token of each request, given the request of each row."""
    if len(requests) == 1:
        return _FIRST
    return np.flatnonzero(np.append(requests[1:] != requests[:-1], True))


def most_wanted(experts: list[int], selected: np.ndarray) -> list[int]:
    """Return the experts by falling number of tokens that select them, `selected` [T, K]; equals
    keep their order."""
    if len(selected) == 1 or len(experts) < 2:
        return experts
    counts = np.bincount(selected[selected >= 0], minlength=max(experts) + 1).tolist()
    return sorted(experts, key=lambda expert: -counts[expert])


def fitting(experts: Sequence[int], room: Sequence[int]) -> list[int]:
    """Return those of a layer's experts that find room on their devices, first come, first served.
    Expert e belongs to device e % N, which has room for `room[e % N]` experts."""
    if len(room) == 1:
        return list(experts[: room[0]])
    left = list(room)
    placed = []
    for expert in experts:
        device = expert % len(left)
        if left[device]:
            left[device] -= 1
            placed.append(expert)
    return placed
