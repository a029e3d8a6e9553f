"""Answers the prompts of a file by a batch that is kept full, until all are answered."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from time import perf_counter

from artifacts.errors import BadInput, first_line
from moectl.generating.answer_file import AnswerFile
from moectl.generating.prompts import PromptFile, PromptRow
from runtime.session.batch import RequestBatch, RowResult
from runtime.session.generate import Sampling, TooLong
from runtime.session.one_by_one import OneByOne
from runtime.session.session import Session


@dataclass(slots=True)
class BatchWork:
    """What this command has done so far: answers, tokens of prompts and answers, passes of the model, seconds."""

    num_answers: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_passes: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Asked:
    row: PromptRow
    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)


class Answering:
    """Fills a file of answers. Row number n is drawn with the seed of `sampling` plus n - 1."""

    def __init__(
        self, session: Session, batch: RequestBatch | OneByOne, sampling: Sampling, answers: AnswerFile
    ) -> None:
        self.done = BatchWork()
        self._session, self._batch, self._sampling, self._answers = session, batch, sampling, answers
        self._asked: dict[int, _Asked] = {}

    def run(self, prompts: PromptFile, told: Callable[[BatchWork], None]) -> None:
        """Answer what is not answered yet; `told` is called after each pass. Raises OutOfResources for a full disk and
        what a pass raises; the file is whole then."""
        begin_s, batch = perf_counter(), self._batch
        rows = islice(prompts.rows(), self._answers.num_written, None)
        while self._fill(rows) or not batch.is_idle:
            for result in batch.step():
                self._take(result)
            self.done.num_passes += 1
            self.done.seconds = perf_counter() - begin_s
            told(self.done)

    def _fill(self, rows: Iterator[PromptRow]) -> bool:
        """Add prompts until one waits for the running ones. False once there are no more."""
        while not self._batch.num_waiting or self._batch.num_running + self._batch.num_waiting <= self._batch.rows:
            row = next(rows, None)
            if row is None:
                return False
            self._begin(row)
        return True

    def _begin(self, row: PromptRow) -> None:
        if row.problem:
            self._refuse(row, *row.problem)
            return
        try:
            ids = self._session.encode(row.prompt)
            sampling = replace(self._sampling, seed=self._sampling.seed + row.number - 1)
            self._asked[self._batch.add(ids, sampling)] = _Asked(row, ids.shape[1])
        except TooLong as error:
            self._refuse(row, "too_long", str(error))
        except (BadInput, ValueError, OverflowError) as error:  # also what tokenizers and templates raise
            self._refuse(row, "cannot_be_encoded", first_line(error))

    def _take(self, result: RowResult) -> None:
        asked = self._asked[result.request]
        if result.token_id is not None:
            asked.token_ids.append(result.token_id)
            self.done.num_tokens += 1
        if not result.is_over:
            return
        del self._asked[result.request]
        if result.error:
            self._refuse(asked.row, "nothing_to_draw", str(result.error))
            return
        self.done.num_answers += 1
        self.done.num_prompt_tokens += asked.num_prompt_tokens
        self._answers.put(asked.row.number, _named(asked.row) | self._answer(asked))

    def _answer(self, asked: _Asked) -> Mapping[str, object]:
        is_whole = len(asked.token_ids) < self._sampling.max_new_tokens
        return {
            "text": self._session.opened.tokenizer.decode(asked.token_ids, skip_special_tokens=True),
            "finish_reason": "stop" if is_whole else "length",
            "prompt_tokens": asked.num_prompt_tokens,
            "token_ids": asked.token_ids,
        }

    def _refuse(self, row: PromptRow, code: str, message: str) -> None:
        self.done.num_answers += 1
        self._answers.put(row.number, {**_named(row), "error": {"code": code, "message": message}})


def _named(row: PromptRow) -> dict[str, object]:
    return {} if row.id is None else {"id": row.id}
