"""The answers to one request: several prompts, and several answers to each, side by side."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import torch

from moectl.serving.jobs import (
    Done,
    Encoded,
    Event,
    Failed,
    GenerationJob,
    LoggedToken,
    LoggedTokens,
    TokenCost,
)
from moectl.serving.scheduler import Scheduler
from moectl.serving.wire import Refusal
from runtime.session.prompts.encoder import Prompt
from runtime.session.replies.pieces import Piece
from runtime.session.replies.reply import Reply


@dataclass(frozen=True, slots=True)
class AnswerChoice:
    """One whole answer, with its tokens and their costs if these were asked for."""

    reply: Reply
    tokens: tuple[LoggedToken, ...]
    done: Done
    costs: tuple[TokenCost, ...] = ()


class AnswerChoices:
    """The jobs of a request, and their events with the number of each. Choices of one prompt lie
    side by side, and draw by seeds that follow each other."""

    def __init__(
        self, asked: GenerationJob, prompts: Sequence[Prompt | torch.Tensor], *, num_each: int
    ) -> None:
        """`asked` has what all jobs have in common. Made on the event loop."""
        self.num_each = num_each
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._early: deque[tuple[int, Event]] = deque()  # which came while prompts were encoded
        self._jobs: list[GenerationJob] = []
        for prompt in prompts:
            first = self._add(replace(asked, prompt=prompt))
            for number in range(1, num_each):
                sampling = replace(asked.sampling, seed=asked.sampling.seed + number)
                self._add(replace(first, sampling=sampling, like=first))

    def _add(self, job: GenerationJob) -> GenerationJob:
        loop = asyncio.get_running_loop()
        index = len(self._jobs)
        job.tell = lambda event: loop.call_soon_threadsafe(self._events.put_nowait, (index, event))
        self._jobs.append(job)
        return job

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(self, scheduler: Scheduler) -> None:
        """Queue all jobs, or none. Raises as `Scheduler.submit`, and Refusal for more than the
        server holds."""
        most = scheduler.num_rows + scheduler.limits.num_waiting
        if len(self) > most:
            raise Refusal(400, f"{len(self)} answers are more than the {most} that are held here")
        try:
            for job in self._jobs:
                scheduler.submit(job)
        except BaseException:
            self.leave(scheduler)
            raise

    def leave(self, scheduler: Scheduler) -> None:
        """Drop the jobs that are not over."""
        for job in self._jobs:
            scheduler.leave(job)

    async def num_prompt_tokens(self) -> int:
        """Wait until all prompts are encoded, and return the number of their tokens, each prompt
        once. Raises Refusal for one that cannot be, so that a stream too has the status of its
        error."""
        num_tokens = 0
        left = len(self)
        while left:
            index, found = await self._events.get()
            match found:
                case Encoded(ids):
                    num_tokens += ids.shape[1] * (index % self.num_each == 0)
                    left -= 1
                case Failed(message, status, code):
                    raise Refusal(status, message, code=code)
                case _:
                    self._early.append((index, found))
        return num_tokens

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield each event with the number of its choice, until all are over or one has failed."""
        left = len(self)
        while left:
            index, item = self._early.popleft() if self._early else await self._events.get()
            yield index, item
            if isinstance(item, Failed):
                return
            left -= isinstance(item, Done)

    async def whole(self) -> list[AnswerChoice]:
        """Wait for all choices. Raises Refusal if one fails."""
        pieces: list[list[Piece]] = [[] for _ in self._jobs]
        tokens: list[list[LoggedToken]] = [[] for _ in self._jobs]
        costs: list[list[TokenCost]] = [[] for _ in self._jobs]
        ends: dict[int, Done] = {}
        async for index, item in self.events():
            match item:
                case Done():
                    ends[index] = item
                case Failed(message, status):
                    raise Refusal(status, message)
                case LoggedTokens(more):
                    tokens[index] += more
                case TokenCost():
                    costs[index].append(item)
                case piece:
                    pieces[index].append(piece)
        return [
            AnswerChoice(
                Reply.of(pieces[index]), tuple(tokens[index]), ends[index], tuple(costs[index])
            )
            for index in range(len(self))
        ]
