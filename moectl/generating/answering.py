"""Answers prompts by a batch that is kept full, until all are answered."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter

from artifacts.errors import BadInput, first_line
from moectl.generating.prompts import PromptRow
from moectl.generating.work import BatchWork
from runtime.control.counters import by_layer, totals
from runtime.session.generation.batch import RequestBatch, RowResult
from runtime.session.generation.charges import Charge
from runtime.session.generation.finite import NotFinite
from runtime.session.generation.round_robin import RoundRobin
from runtime.session.generation.sampling import Sampling, TooLong
from runtime.session.session import Session


@dataclass(slots=True)
class _Asked:
    row: PromptRow
    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    num_passes: int = 0
    charge: Charge = field(default_factory=Charge)


class Answering:
    """Gives `put` the number and the answer of each row, in any order. Row number n is drawn with
    the seed of `sampling` plus n - 1. With `has_counters` an answer says what it took."""

    def __init__(
        self,
        session: Session,
        batch: RequestBatch | RoundRobin,
        sampling: Sampling,
        put: Callable[[int, Mapping[str, object]], None],
        *,
        has_counters: bool = False,
    ) -> None:
        self.done = BatchWork()
        self._session = session
        self._batch = batch
        self._sampling = sampling
        self._put = put
        self._has_counters = has_counters
        self._asked: dict[int, _Asked] = {}

    def run(
        self, rows: Iterator[PromptRow], told: Callable[[BatchWork], None] = lambda done: None
    ) -> None:
        """Answer all rows; `told` is called after each pass. Raises what `put` and a pass raise."""
        begin_s = perf_counter()
        batch = self._batch
        before = self._session.effort()
        while self._fill(rows) or not batch.is_idle:
            for result in batch.step():
                self._take(result)
            self.done.num_passes += 1
            self.done.seconds = perf_counter() - begin_s
            told(self.done)
        after = self._session.effort()
        self.done.counters.update(after.counters)
        self.done.counters.subtract(before.counters)
        self.done.exposed_ms = after.exposed_ms - before.exposed_ms

    def _fill(self, rows: Iterator[PromptRow]) -> bool:
        """Add prompts until one waits for the running ones. False once there are no more."""
        while (
            not self._batch.num_waiting
            or self._batch.num_running + self._batch.num_waiting <= self._batch.rows
        ):
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
        except (
            BadInput,
            ValueError,
            OverflowError,
        ) as error:  # also what tokenizers and templates raise
            self._refuse(row, "cannot_be_encoded", first_line(error))

    def _take(self, result: RowResult) -> None:
        asked = self._asked[result.request]
        if self._has_counters:
            asked.num_passes += bool(result.charge.passes)
            asked.charge += result.charge
        if result.token_id is not None:
            asked.token_ids.append(result.token_id)
            self.done.num_tokens += 1
        if not result.is_over:
            return
        del self._asked[result.request]
        if result.error and not isinstance(result.error, BadInput):
            raise result.error
        if result.error:
            code = "not_finite" if isinstance(result.error, NotFinite) else "nothing_to_draw"
            self._refuse(asked.row, code, str(result.error))
            return
        self.done.num_answers += 1
        self.done.num_prompt_tokens += asked.num_prompt_tokens
        self._put(asked.row.number, _named(asked.row) | self._answer(asked))

    def _answer(self, asked: _Asked) -> Mapping[str, object]:
        is_whole = len(asked.token_ids) < self._sampling.max_new_tokens
        return {
            "text": self._session.opened.tokenizer.decode(
                asked.token_ids, skip_special_tokens=True
            ),
            "finish_reason": "stop" if is_whole else "length",
            "prompt_tokens": asked.num_prompt_tokens,
            "token_ids": asked.token_ids,
        } | ({"moectl": _took(asked)} if self._has_counters else {})

    def _refuse(self, row: PromptRow, code: str, message: str) -> None:
        self.done.num_answers += 1
        self._put(row.number, {**_named(row), "error": {"code": code, "message": message}})


def _took(asked: _Asked) -> dict[str, object]:
    charge = asked.charge
    return {
        "counters": totals(by_layer(charge.counters)) | {"exposed_ms": charge.exposed_s * 1e3},
        "passes": asked.num_passes,
        "share_of_passes": charge.passes / asked.num_passes,
        "busy_ms": charge.seconds * 1e3,
    }


def _named(row: PromptRow) -> dict[str, object]:
    return {} if row.id is None else {"id": row.id}
