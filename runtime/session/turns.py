"""Requests of a batch that share no pass: they take turns, with the same calls and results."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from artifacts.errors import detached
from runtime.model.row_attention import reason_not_joined
from runtime.policies import describe
from runtime.session.batch import ROOM, TILE, KeptPrompts, RequestBatch, RowResult
from runtime.session.charges import Charge
from runtime.session.generate import Sampling, check_prompt
from runtime.session.interleave import Generation, Interleave
from runtime.session.session import Session

# Passes of a request before the next one's turn: more delay the others, fewer lower the hit rate,
# since every change of request evicts some experts of the last one (figures in docs/decisions.md).
PASSES = 4


@dataclass(slots=True, eq=False)
class _Asked:
    request: int
    owner: Hashable
    prompt: torch.Tensor
    sampling: Sampling
    generation: Generation | None = None

    def end(self) -> None:
        if self.generation is not None and not self.generation.is_over:
            self.generation.close()


class Turns:
    """Answers at most `rows` requests at a time, in turns of `PASSES` passes, each by a generation
    of its own. An answer is bit for bit the one that the request would get alone, where the
    policies lose nothing. Calls and results are those of `RequestBatch`."""

    kept = KeptPrompts()  # none

    def __init__(self, session: Session, *, rows: int = 1) -> None:
        # Where residency follows the prompt, a second request would change it during the answer to
        # the first.
        self.session = session
        self.rows = 1 if session.parts.policies.residency.places else rows
        self._interleave = Interleave(session)
        self._waiting: deque[_Asked] = deque()
        self._running: deque[_Asked] = deque()  # the first one has the turn
        self._num_added = self._num_passes = 0  # passes of the present turn

    def __enter__(self) -> "Turns":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the session back; requests that are not over are dropped."""
        for asked in self._running:
            asked.end()
        self._running.clear()
        self._waiting.clear()
        self._interleave.close()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """True if every request is over."""
        return not self._running and not self._waiting

    def add(self, prompt: torch.Tensor, sampling: Sampling, *, owner: Hashable = None) -> int:
        """Add a request, as `RequestBatch.add` does."""
        check_prompt(self.session.opened.model, prompt, sampling.max_new_tokens)
        self._num_added += 1
        self._waiting.append(_Asked(self._num_added, owner, prompt, sampling))
        return self._num_added

    def cancel(self, request: int) -> None:
        """Cancel a request, as `RequestBatch.cancel` does."""
        if self._running and self._running[0].request == request:
            self._num_passes = 0
        for queue in (self._waiting, self._running):
            for asked in [one for one in queue if one.request == request]:
                queue.remove(asked)
                asked.end()

    def step(self) -> list[RowResult]:
        """Run one pass of the request that has the turn, with results as of `RequestBatch.step`."""
        while self._waiting and len(self._running) < self.rows:
            self._running.append(self._waiting.popleft())
        if not self._running:
            return []
        asked = self._running[0]
        result = self._pass(asked)
        self._num_passes += 1
        if result.is_over:
            self._running.popleft()
            self._num_passes = 0
        elif self._num_passes == PASSES:
            self._running.rotate(-1)
            self._num_passes = 0
        return [result]

    def _pass(self, asked: _Asked) -> RowResult:
        try:
            asked.generation = asked.generation or self._interleave.begin(
                asked.prompt, asked.sampling
            )
            result = asked.generation.step()
        except Exception as error:
            return RowResult.failed(asked.request, asked.owner, detached(error))
        charge = Charge(result.counters, exposed_s=result.exposed_s, seconds=result.seconds)
        token = result.token.token_id if result.token else None
        return RowResult(asked.request, asked.owner, token, asked.generation.is_over, charge)


def open_batch(
    session: Session,
    *,
    rows: int,
    tile: int = TILE,
    room: int = ROOM,
    kept_nbytes: int | None = None,
    in_ram: bool = False,
) -> RequestBatch | Turns:
    """Return a `RequestBatch` of `rows` rows. Return `Turns`, which answers requests one after the
    other, for one row, or where requests cannot share a pass; the receipt then gives the reason."""
    reason = why_one_by_one(session)
    if rows > 1 and reason is None:
        return RequestBatch(
            session, rows=rows, tile=tile, room=room, kept_nbytes=kept_nbytes, in_ram=in_ram
        )
    line = f"batch: requests are answered one at a time: {reason}"
    if rows > 1 and line not in session.fallbacks:
        session.fallbacks.append(line)
    return Turns(session)


def why_one_by_one(session: Session) -> str | None:
    """Return the reason why the requests of a session cannot share a pass, None if they can."""
    policy = session.parts.policies.residency
    if policy.places:
        return f"--residency {describe(policy)} chooses the experts of the fast tier by the prompt"
    return reason_not_joined(session.opened.model)
