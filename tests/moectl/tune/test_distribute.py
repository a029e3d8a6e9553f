"""A search with workers finds what it finds alone; a combination that kills its worker is left
out."""

import multiprocessing
import os
import signal

import pytest

from artifacts.errors import OutOfResources
from moectl.tune import distribute
from moectl.tune.distribute import ReplayTask, Task, spread
from profilers.workers.workers import Processes
from runtime.search.results import Tried
from runtime.search.space import Combination
from tests.runtime.search.test_search import FAST, search


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork workers, which saves each a second of imports; tests/profilers covers spawned ones."""
    monkeypatch.setattr(
        "profilers.workers.workers.get_context", lambda _: multiprocessing.get_context("fork")
    )


class Fragile(ReplayTask):
    def __call__(self, task: Task) -> tuple:
        if task[0].miss == "near":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(task)


def test_replays_of_workers_are_those_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = search()
    divided = search()
    tried = [one for one in FAST if one.prefetch == "none"] + [Combination(prefetch="learned")]
    with spread(divided, Processes(2)) as replay_all:
        *found, refused = replay_all(tried, 30)
    assert (
        found == [alone.replay(one, 30) for one in tried[:-1]]
        and divided.num_replays == alone.num_replays
    )
    assert "moectl build-predictor" in str(refused)
    with spread(divided, Processes(1)) as replay_all:
        assert replay_all is None

    monkeypatch.setattr(distribute, "ReplayTask", Fragile)
    with spread(divided, Processes(2)) as replay_all:
        found = dict(zip(tried[:-1], replay_all(tried[:-1], 30), strict=True))
    lost = [result for one, result in found.items() if one.miss == "near"]
    assert lost and all(
        isinstance(one, OutOfResources) and "tried 3 times" in str(one) for one in lost
    )
    assert all(isinstance(result, Tried) for one, result in found.items() if one.miss != "near")
