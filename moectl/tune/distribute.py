"""Distributes the replays of a search over worker processes, one round of the search at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from artifacts.errors import OutOfResources, Problem
from profilers.workers.workers import ATTEMPTS, Executor, Workers
from runtime.search.results import ReplayAll, Tried
from runtime.search.search import Search
from runtime.search.space import Combination

Task = tuple[Combination, int]


class ReplayTask:
    """The task of a worker process: replays one combination of policies."""

    def __init__(self, search: Search) -> None:
        self._search = search.apart()

    def __call__(self, task: Task) -> tuple[Task, Tried | Problem, list[str]]:
        try:
            outcome = self._search.replay(*task)
        except Problem as problem:
            outcome = problem
        return task, outcome, self._search.assumed


@contextmanager
def spread(search: Search, executor: Executor) -> Iterator[ReplayAll | None]:
    """Lend a function that replays many combinations at a time, or None if the search is to replay
    them itself.

    A combination that kills its worker at every attempt yields OutOfResources; the search goes on
    without it.
    """
    if executor.is_here:
        yield None
        return
    outcomes: dict[Task, Tried | Problem] = {}

    def on_replayed(done: tuple[Task, Tried | Problem, list[str]]) -> None:
        task, outcomes[task], assumed = done
        if isinstance(outcomes[task], Tried):
            search.count(assumed)

    with Workers(ReplayTask(search), executor, on_replayed) as workers:

        def replay_all(combinations: Sequence[Combination], passes: int) -> list[Tried | Problem]:
            tasks = [(combination, passes) for combination in combinations]
            for task in tasks:
                workers.submit(task, task)
            for task, error in workers.persist(lambda task: workers.submit(task, task)).items():
                reason = str(error).strip().splitlines()[-1]
                outcomes[task] = OutOfResources(
                    f"it was tried {ATTEMPTS} times and could not be replayed: {reason}"
                )
            return [outcomes.pop(task) for task in tasks]

        yield replay_all
