"""Jobs that a thread does in order beside the steps; a caller who needs an answer earlier does them
itself."""

import threading
from collections import deque
from collections.abc import Callable


class BackgroundJobs:
    """Without `run_in_background` jobs wait until the caller asks for an answer. One job is done at
    a time, so that jobs may share state.

    The caller does all jobs up to the one it asks for itself: a thread without a free core would
    keep it waiting.
    """

    def __init__(self) -> None:
        self._waiting: deque[BackgroundJob] = deque()
        self._doing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._calls = threading.Semaphore(0)
        self._is_closing = False

    def run_in_background(self) -> None:
        """Do jobs on one thread from now on, as they are added."""
        if self._thread is None:
            self._is_closing = False
            self._thread = threading.Thread(target=self._work, name="matching", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread, if there is one, after its current job."""
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
        """Return what the job's call returned, or raise what it raised."""
        while not job.is_done:
            self._do_next()
        if job.error is not None:
            raise job.error
        return job.result

    def catch_up(self) -> None:
        """Do all waiting jobs."""
        while self._waiting:
            self._do_next()

    def _do_next(self) -> None:
        """Do the first waiting job. It leaves the queue once it is done, so that an interrupted job
        is done again by the next caller."""
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
        self.is_done = False
        self.result = None
        self.error = None
        self._call = call
        self._arguments = arguments

    def do(self) -> None:
        try:
            self.result = self._call(*self._arguments)
        except Exception as error:  # raised again by `answer`; an interruption is raised here
            self.error = error
        self._call = self._arguments = None  # free what the job refers to
        self.is_done = True
