"""Jobs are done once and in order, by the thread or the caller; what they raise reaches the
caller."""

import threading
import time

import pytest

from runtime.policies.shared.background import BackgroundJobs


@pytest.mark.parametrize("in_background", [False, True])
def test_jobs_are_done_once_and_in_order(in_background: bool) -> None:
    jobs = BackgroundJobs()
    done = []
    if in_background:
        jobs.run_in_background()
    for batch in range(50):
        added = [jobs.add(done.append, 10 * batch + number) for number in range(10)]
        if batch % 3:
            jobs.answer(added[batch % 10])
    jobs.answer(jobs.add(len, done))
    jobs.close()
    jobs.close()
    assert done == list(range(500))


def test_a_caller_does_not_wait_for_a_thread_that_is_busy_elsewhere() -> None:
    jobs = BackgroundJobs()
    did = []
    first = jobs.add(lambda: did.append(threading.current_thread().name))
    assert not did, "nobody has asked"
    jobs.answer(first)
    assert did == [threading.current_thread().name]
    jobs.run_in_background()
    jobs.add(lambda: did.append(threading.current_thread().name))
    deadline = time.monotonic() + 10
    while len(did) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    jobs.close()
    assert did[1] == "matching", "nobody has asked, and it is done all the same"


def test_what_a_job_raises_reaches_the_caller() -> None:
    jobs = BackgroundJobs()
    failed = jobs.add(lambda: 1 / 0)
    other = jobs.add(lambda: 7)
    assert jobs.answer(other) == 7
    with pytest.raises(ZeroDivisionError):
        jobs.answer(failed)
