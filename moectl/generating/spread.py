"""Answers the prompts of a file on many workers: each holds the model at the budget, and answers a
part of the rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from time import perf_counter

from artifacts.errors import Partly
from moectl.generating.answer_file import AnswerFile
from moectl.generating.answering import Answering
from moectl.generating.prompts import PromptRow
from moectl.generating.work import BatchWork
from moectl.shared.batch_size import batch_size
from profilers.workers.same_model import SameModel
from profilers.workers.workers import ATTEMPTS, Executor, Workers
from runtime.session.generation.round_robin import open_batch
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session
from runtime.session.settings import Settings

_MIN_TASKS = 4  # for each worker, where there are enough rows
_MOST_ROWS = 512  # of a task: a batch is full for most of it, and a lost task is soon done again
_TASKS_AHEAD = 16  # of each worker: what is answered before a lost row is waits in memory


@dataclass(frozen=True, slots=True)
class RowsAnswered:
    """Result of a task: its answers by the number of the row, in any order; the work they took; and
    how they were run."""

    answers: tuple[tuple[int, Mapping[str, object]], ...]
    done: BatchWork
    receipt: Mapping[str, object]
    batch: int


class AnswerRows:
    """The work of a worker: answers the rows of a task together, on one thread. The first task
    opens the model.

    `batch` is the number of requests at a time, None: as many as memory allows beside `together -
    1` other workers.
    """

    def __init__(
        self,
        model: SameModel,
        settings: Settings,
        *,
        store: Path | None,
        base: int,
        sampling: Sampling,
        batch: int | None,
        together: int,
        has_counters: bool = False,
    ) -> None:
        self._model = model
        self._settings = replace(settings, device="cpu", threads=1)
        self._store = store and store.resolve()
        self._base = base
        self._sampling = sampling
        self._batch = batch
        self._together = together
        self._has_counters = has_counters
        self._session: Session | None = None

    def __call__(self, rows: Sequence[PromptRow]) -> RowsAnswered:
        """Raises Incompatible where the model's name leads to another model, and what opening it
        and a pass raise."""
        session = self._opened()
        size = batch_size(session, self._batch, together=self._together)
        answers: list[tuple[int, Mapping[str, object]]] = []
        with open_batch(session, rows=size.rows, room=size.room) as batch:
            answering = Answering(
                session,
                batch,
                self._sampling,
                lambda *answer: answers.append(answer),
                has_counters=self._has_counters,
            )
            answering.run(iter(rows))
        return RowsAnswered(tuple(answers), answering.done, session.receipt(), batch.rows)

    def _opened(self) -> Session:
        if self._session is None:
            opened = self._model.open(dense=self._settings.dense)
            self._session = Session.over(
                opened, self._settings, store=self._store, base=self._base, name=self._model.name
            )
        return self._session


class SpreadAnswering:
    """Gives workers the rows in parts, and writes their answers to the file `answers`. `receipt`
    and `batch` are those of the worker that answered last, None before the first."""

    def __init__(self, work: AnswerRows, executor: Executor, answers: AnswerFile) -> None:
        self.done = BatchWork()
        self.receipt: Mapping[str, object] | None = None
        self.batch: int | None = None
        self._work = work
        self._executor = executor
        self._answers = answers

    def run(
        self, rows: Iterator[PromptRow], num_rows: int, told: Callable[[BatchWork], None]
    ) -> None:
        """Answer all `num_rows` rows; `told` is called after each part. A part whose worker is
        killed goes to another.

        Raises Partly for a part that failed at every attempt: the file then has all answers before
        it, and the same command goes on there. Raises OutOfResources for a full disk, and any other
        Problem of a worker.
        """
        begin_s = perf_counter()
        size = max(1, min(_MOST_ROWS, num_rows // (_MIN_TASKS * self._executor.count)))

        def take(answered: RowsAnswered) -> None:
            for number, answer in answered.answers:
                self._answers.put(number, answer)
            self.done.add(answered.done)
            self.done.seconds = perf_counter() - begin_s
            self.receipt = answered.receipt
            self.batch = answered.batch
            told(self.done)

        with Workers(self._work, self._executor, take) as workers:
            tasks = iter(lambda: tuple(islice(rows, size)), ())
            while ahead := {
                part[0].number: part for part in islice(tasks, _TASKS_AHEAD * self._executor.count)
            }:
                for first, part in ahead.items():
                    workers.submit(part, first)
                lost = workers.persist(
                    lambda first, ahead=ahead: workers.submit(ahead[first], first)
                )
                if lost:
                    raise _lost(ahead, lost)


def _lost(ahead: Mapping[int, Sequence[PromptRow]], lost: Mapping[int, Exception]) -> Partly:
    first = min(lost)
    reason = str(lost[first]).strip().splitlines()[-1]
    return Partly(
        f"rows {first:,} to {ahead[first][-1].number:,} were tried {ATTEMPTS} times and could not "
        f"be answered: {reason}; all answers before them are kept, and the same command goes on "
        "there"
    )
