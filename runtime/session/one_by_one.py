"""Requests of a batch one after the other, where they cannot share a pass: with the same calls and results."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from artifacts.errors import BadInput
from runtime.model.row_attention import reason_not_joined
from runtime.policies import describe
from runtime.session.batch import ROOM, TILE, RequestBatch, RowResult
from runtime.session.charges import Charge
from runtime.session.generate import Sampling, check_prompt
from runtime.session.interleave import Generation, Interleave
from runtime.session.session import Session


@dataclass(slots=True, eq=False)
class _Asked:
    request: int
    owner: Hashable
    prompt: torch.Tensor
    sampling: Sampling
    generation: Generation | None = None


class OneByOne:
    """Answers one request after the other, each by a generation of its own: to the bit what it would be alone, where
    the policies lose nothing. Calls and results are those of `RequestBatch`."""

    rows = 1

    def __init__(self, session: Session) -> None:
        self.session = session
        self._turns = Interleave(session)
        self._asked: deque[_Asked] = deque()  # the first one is being answered
        self._num_added = 0

    def __enter__(self) -> "OneByOne":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the session back; requests that are not over are dropped."""
        for asked in self._asked:
            _end(asked)
        self._asked.clear()
        self._turns.close()

    @property
    def num_running(self) -> int:
        return min(len(self._asked), 1)

    @property
    def num_waiting(self) -> int:
        return len(self._asked) - self.num_running

    @property
    def is_idle(self) -> bool:
        """Whether every request is over."""
        return not self._asked

    def add(self, prompt: torch.Tensor, sampling: Sampling, *, owner: Hashable = None) -> int:
        """As `RequestBatch.add`."""
        check_prompt(self.session.opened.model, prompt, sampling.max_new_tokens)
        self._num_added += 1
        self._asked.append(_Asked(self._num_added, owner, prompt, sampling))
        return self._num_added

    def cancel(self, request: int) -> None:
        """As `RequestBatch.cancel`."""
        for asked in [one for one in self._asked if one.request == request]:
            _end(asked)
            self._asked.remove(asked)

    def step(self) -> list[RowResult]:
        """Run one pass of the first request. As `RequestBatch.step`."""
        if not self._asked:
            return []
        asked = self._asked[0]
        asked.generation = asked.generation or self._turns.begin(asked.prompt, asked.sampling)
        try:
            result = asked.generation.step()
        except BadInput as error:
            self._asked.popleft()
            return [RowResult(asked.request, asked.owner, None, True, Charge(), error)]
        if asked.generation.is_over:
            self._asked.popleft()
        charge = Charge.whole(result.counters, exposed_s=result.exposed_s, seconds=result.seconds)
        token = result.token.token_id if result.token else None
        return [RowResult(asked.request, asked.owner, token, asked.generation.is_over, charge)]


def open_batch(session: Session, *, rows: int, tile: int = TILE, room: int = ROOM) -> RequestBatch | OneByOne:
    """A `RequestBatch` of so many rows; requests one by one for one row, or where they cannot share a pass, which the
    receipt then says."""
    reason = why_one_by_one(session)
    if rows > 1 and reason is None:
        return RequestBatch(session, rows=rows, tile=tile, room=room)
    line = f"batch: requests are answered one at a time: {reason}"
    if rows > 1 and line not in session.fallbacks:
        session.fallbacks.append(line)
    return OneByOne(session)


def why_one_by_one(session: Session) -> str | None:
    """Why the requests of a session cannot share a pass, None if they can."""
    policy = session.parts.policies.residency
    if policy.places:
        return f"--residency {describe(policy)} chooses the experts of the fast tier by the prompt"
    return reason_not_joined(session.opened.model)


def _end(asked: _Asked) -> None:
    if asked.generation is not None and not asked.generation.is_over:
        asked.generation.close()
