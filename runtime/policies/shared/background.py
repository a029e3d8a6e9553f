"""Jobs that a thread does beside the steps, in order; or whoever needs an answer that it has not come to yet."""

import threading
from collections import deque
from collections.abc import Callable


class BackgroundJobs:
    """Without `run_in_background` jobs wait until somebody asks. One is done at a time, so that they share what they
    like; who asks for an answer does what is still in front of it himself, as a thread that the machine has no core for
    would keep him waiting."""

    def __init__(self) -> None:
        self._waiting: deque[BackgroundJob] = deque()
        self._doing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._calls = threading.Semaphore(0)
        self._is_closing = False

    def run_in_background(self) -> None:
        """From here on jobs are taken up as they come, on one thread."""
        if self._thread is None:
            self._is_closing = False
            self._thread = threading.Thread(target=self._work, name="matching", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread, if there is one, after the job that it is at."""
        if self._thread is not None:
            self._is_closing = True
            self._calls.release()
            self._thread.join()
            self._thread = None

    def add(self, call: Callable, *arguments: object) -> "BackgroundJob":
        job = BackgroundJob(call, arguments)
        self._waiting.append(job)
        if self._thread is not None:
            self._calls.release()
        return job

    def answer(self, job: "BackgroundJob") -> object:
        """What the job's call returned, or raised."""
        while not job.is_done:
            self._do_next()
        if job.error is not None:
            raise job.error
        return job.result

    def catch_up(self) -> None:
        """Do what waits."""
        while self._waiting:
            self._do_next()

    def _do_next(self) -> None:
        """A job leaves the queue once it is done: one that was interrupted is done again by who asks next."""
        with self._doing:
            if self._waiting:
                if not self._waiting[0].is_done:
                    self._waiting[0].do()
                self._waiting.popleft()

    def _work(self) -> None:
        while True:
            self._calls.acquire()
            if self._is_closing:
                return
            self._do_next()


class BackgroundJob:
    def __init__(self, call: Callable, arguments: tuple) -> None:
        self.is_done, self.result, self.error = False, None, None
        self._call, self._arguments = call, arguments

    def do(self) -> None:
        try:
            self.result = self._call(*self._arguments)
        except Exception as error:  # it belongs to who asks for the answer; an interruption to who does the job
            self.error = error
        self._call = self._arguments = None  # what it was about is no longer needed
        self.is_done = True
