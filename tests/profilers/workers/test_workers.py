"""Every task is done once, in processes that ignore Ctrl-C. Failures of workers are tested in
tests/faults."""

import os
import signal
from multiprocessing import resource_tracker

import pytest

from profilers.workers.workers import Processes, Workers

pytestmark = pytest.mark.slow


def work(task: object) -> object:
    return task, os.getpid(), signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("count", [1, 2])
def test_every_task_once(count: int) -> None:
    """The worker that starts multiprocessing's tracker, which unblocks interrupts, ignores Ctrl-C
    too."""
    resource_tracker._resource_tracker._stop()
    heard = []
    with Workers(work, Processes(count), heard.append) as workers:
        for task in range(7):
            workers.submit(task)
        assert workers.finish() == {}
    assert sorted(task for task, _, _ in heard) == list(range(7))
    assert {is_deaf for _, _, is_deaf in heard} == {count > 1} and not work(None)[2]
    processes = {process for _, process, _ in heard}
    assert (
        processes == {os.getpid()}
        if count == 1
        else os.getpid() not in processes and len(processes) <= 2
    )
