"""Records what the routers chose, so that the run can be replayed."""

import numpy as np

from artifacts.errors import BadInput
from artifacts.traces.trace import DECODE, PREFILL, Trace
from runtime.policies.base import Step


class Recorder:
    """Collects steps; `trace()` returns them as one `Trace`. Positions count each request's tokens
    from 0."""

    def __init__(self) -> None:
        self._rows: list[dict[str, np.ndarray]] = []
        self._lengths: dict[int, int] = {}
        self._positions = np.empty(0, np.int32)
        self._embeddings: list[np.ndarray] = []
        self._num_iterations = 0

    def begin_pass(self, requests: np.ndarray) -> None:
        """Begin a pass; `requests` [T] is the request of each of its tokens."""
        self._requests = requests
        self._is_new = True
        self._positions = np.empty(len(requests), np.int32)
        for request in np.unique(requests).tolist():
            rows = np.flatnonzero(requests == request)
            start = self._lengths.get(request, 0)
            self._positions[rows] = start + np.arange(len(rows))
            self._lengths[request] = start + len(rows)

    def add(self, step: Step) -> None:
        num_tokens = len(step.selected)
        if self._is_new and step.embedding is not None:
            self._embed(step)
        self._rows.append(
            {
                "request": self._requests.astype(np.int32),
                "pass_": np.full(num_tokens, step.pass_index, np.int32),
                "phase": _phases(step),
                "layer": np.full(num_tokens, step.layer, np.int32),
                "token": self._positions,
                "experts": step.selected.astype(np.uint16),
                "weights": step.weights.astype(np.float32),
                "probabilities": step.probabilities,
                "predicted": step.predicted,
                "learned": step.learned,
                "iteration": None if step.embedding is None else self._iteration,
                "rejected": None if step.drafted is None else step.drafted,
                "foretold": None if step.foretold is None else step.foretold[:, step.layer],
            }
        )

    def settle(self, rejected: np.ndarray, in_vain: np.ndarray) -> None:
        """Note which tokens [T] of the last pass are rejected drafts, and which were read in vain,
        rejected or to be read again: the next ones of their requests take their positions."""
        for row in reversed(self._rows):
            if row["token"] is not self._positions:
                break
            row["rejected"] = rejected
        for request in self._requests[in_vain].tolist():
            self._lengths[request] -= 1

    def trace(self) -> Trace:
        """Return the recorded steps. Raises BadInput when there is none, as when every pass failed
        before its first router."""
        if not self._rows:
            raise BadInput("nothing was recorded: no pass got to its first router")
        self._fill("rejected", np.zeros(1, bool))
        self._fill("foretold", np.full((1, self._rows[0]["experts"].shape[1]), -1, np.int32))
        columns = [name for name, column in self._rows[0].items() if column is not None]
        embeddings = np.concatenate(self._embeddings) if self._embeddings else None
        joined = {name: np.concatenate([row[name] for row in self._rows]) for name in columns}
        return Trace(**joined, embeddings=embeddings)

    def _fill(self, name: str, nothing: np.ndarray) -> None:
        """Give steps that lack a column of others `nothing` [1, ...] in each row."""
        if any(row[name] is not None for row in self._rows):
            for row in self._rows:
                if row[name] is None:
                    row[name] = nothing.repeat(len(row["layer"]), axis=0)

    def _embed(self, step: Step) -> None:
        """Keep the input embeddings of this pass's requests, once a pass."""
        self._is_new = False
        counts = np.diff(step.last, prepend=-1)
        self._iteration = self._num_iterations + np.repeat(
            np.arange(len(counts), dtype=np.int32), counts
        )
        self._embeddings.append(step.embedding)
        self._num_iterations += len(counts)


def _phases(step: Step) -> np.ndarray:
    """Return the phase of each token."""
    if step.prompts is None:
        return np.full(len(step.selected), step.phase, np.uint8)
    return np.where(step.prompts, PREFILL, DECODE).astype(np.uint8)
