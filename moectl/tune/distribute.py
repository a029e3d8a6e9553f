"""The replays of a search for policies by workers: whole rounds at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from artifacts.errors import OutOfResources, Problem
from profilers.workers.workers import ATTEMPTS, Executor, Workers
from runtime.search.results import ReplayAll, Tried
from runtime.search.search import Search
from runtime.search.space import Combination

Task = tuple[Combination, int]


class Trying:
    """The work of a worker: it searches nothing, and replays what it is told."""

    def __init__(self, search: Search) -> None:
        self._search = search.apart()

    def __call__(self, task: Task) -> tuple[Task, Tried | Problem, list[str]]:
        try:
            found = self._search.replay(*task)
        except Problem as problem:
            found = problem
        return task, found, self._search.assumed


@contextmanager
def spread(search: Search, executor: Executor) -> Iterator[ReplayAll | None]:
    """Lend what replays many combinations at a time; None where that is for the search itself to do. What takes its
    worker with it every time is a Problem of its own, and the search goes on without it."""
    if executor.is_here:
        yield None
        return
    found: dict[Task, Tried | Problem] = {}

    def heard(done: tuple[Task, Tried | Problem, list[str]]) -> None:
        task, found[task], assumed = done
        if isinstance(found[task], Tried):
            search.count(assumed)

    with Workers(Trying(search), executor, heard) as workers:

        def replay_all(combinations: Sequence[Combination], passes: int) -> list[Tried | Problem]:
            tasks = [(one, passes) for one in combinations]
            for task in tasks:
                workers.submit(task, task)
            for task, error in workers.persist(lambda task: workers.submit(task, task)).items():
                reason = str(error).strip().splitlines()[-1]
                found[task] = OutOfResources(f"it was tried {ATTEMPTS} times and could not be replayed: {reason}")
            return [found.pop(task) for task in tasks]

        yield replay_all
