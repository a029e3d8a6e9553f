"""Workers: every task is done once, and what goes wrong in a process is told in the one that made it."""

import os
import signal
from multiprocessing import resource_tracker

import pytest

from artifacts.errors import OutOfResources
from profilers.workers import Workers


def work(task: object) -> object:
    if task == "full":
        raise OutOfResources("no space left")
    if task == "bug":
        raise ValueError("of ours")
    if task == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return task, os.getpid()


@pytest.mark.parametrize("count", [1, 2])
def test_every_task_once(count: int) -> None:
    heard = []
    with Workers(work, count, heard.append) as workers:
        for task in range(7):
            workers.submit(task)
        workers.finish()
    assert sorted(task for task, _ in heard) == list(range(7))
    processes = {process for _, process in heard}
    assert processes == {os.getpid()} if count == 1 else os.getpid() not in processes and len(processes) <= 2


def is_deaf(_: object) -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_workers_are_deaf_to_ctrl_c_from_the_first_one_on() -> None:
    """Also the one with which multiprocessing's tracker starts, which lets interrupts in again."""
    resource_tracker._resource_tracker._stop()
    heard = []
    with Workers(is_deaf, 2, heard.append) as workers:
        for task in range(2):
            workers.submit(task)
        workers.finish()
    assert heard == [True, True] and not is_deaf(None)


def test_what_goes_wrong_is_told() -> None:
    for task, kind, says in (
        ("full", OutOfResources, "^no space left$"),
        ("bug", RuntimeError, "(?s)in a worker process:.*ValueError: of ours"),
        ("killed", OutOfResources, r"a worker process ended \(code -9\).*fewer --jobs"),
    ):
        with pytest.raises(kind, match=says), Workers(work, 2, lambda result: None) as workers:
            workers.submit(task)
            workers.finish()


def test_leaving_ends_the_processes() -> None:
    with pytest.raises(KeyboardInterrupt), Workers(work, 2, lambda result: None) as workers:
        workers.submit(1)
        worker = workers._busy[0].process
        raise KeyboardInterrupt
    assert not worker.is_alive()
