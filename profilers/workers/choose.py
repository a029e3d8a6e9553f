"""Chooses the executor that the command line names."""

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from artifacts.errors import BadUsage
from profilers.workers.workers import Executor, Processes
from runtime.devices import is_host
from runtime.model.open import MoeModel

LOCAL = "local"
_RAY = re.compile(r"ray(:auto|:.+:\d+)?")


def check_executor(text: str) -> None:
    """Raise BadUsage for a text that names no executor."""
    if text != LOCAL and not _RAY.fullmatch(text):
        raise BadUsage(
            f"--executor {text!r} is not understood: give local, ray, ray:auto or ray:HOST:PORT"
        )


def is_spread(text: str, jobs: int | None) -> bool:
    """Return whether tasks go to workers; they go to workers of this machine only where their
    number is given."""
    return jobs is not None or text != LOCAL


def replaying(text: str, jobs: int | None) -> AbstractContextManager[Executor]:
    """Lend an executor as `executing` does, but one replay at a time by default on this machine."""
    return executing(text, jobs or (1 if text == LOCAL else None))


def check_device(opened: MoeModel) -> None:
    """Raise BadUsage for a model on a GPU: workers compute on CPUs."""
    if not is_host(opened.model.device):
        raise BadUsage(
            "workers compute on CPUs: give --device cpu, or neither --executor nor --jobs"
        )


@contextmanager
def executing(text: str, jobs: int | None) -> Iterator[Executor]:
    """Lend an executor: for `local`, `jobs` processes of this machine; for `ray[:address]`, a
    cluster that does `jobs` tasks at a time; without `jobs`, one per core. Raises BadUsage, and
    OutOfResources for a cluster out of reach."""
    check_executor(text)
    if text == LOCAL:
        yield Processes(jobs or os.cpu_count() or 1)
        return
    try:
        from profilers.workers.ray import ray_cluster
    except ModuleNotFoundError as missing:
        raise BadUsage(f"--executor ray needs {missing.name}: pip install 'moectl[ray]'") from None
    with ray_cluster(text.partition(":")[2] or None, jobs) as cluster:
        yield cluster
