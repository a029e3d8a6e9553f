"""Workers on a Ray cluster: what processes of one machine do, on all the machines that it has.

A worker is a place in the cluster's queue, and Ray says where its task runs. Tasks and results travel pickled, as they
do between processes: arrays are then the task's own, and not views of memory that cannot be written.
"""

import logging
import os
import pickle
import socket
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from uuid import uuid4

import ray
import torch
from ray._private import worker as rays_worker
from ray.exceptions import RayError, RayTaskError

from artifacts.errors import Incompatible, OutOfResources, first_line
from profilers.workers.memory import return_large_buffers
from profilers.workers.workers import Work, outcome

_QUIET = {"logging_level": logging.ERROR, "log_to_driver": False}
_PATIENCE_S = 10.0  # until somebody answers at an address
_known: dict[str, Work] = {}  # in a process of the cluster: the work that its last task was for


class RayCluster:
    """An executor: `count` tasks at a time on the cluster that this process has joined."""

    is_here = False

    def __init__(self, count: int) -> None:
        self.count = count
        self._stored: dict[int, tuple[Work, str, ray.ObjectRef]] = {}

    def start(self, work: Work) -> "RayWorker":
        """The work itself goes to the cluster once, and to a process with its first task."""
        if id(work) not in self._stored:
            self._stored[id(work)] = work, uuid4().hex, ray.put(pickle.dumps(work))
        _, name, kept = self._stored[id(work)]
        return RayWorker(name, kept)

    def ready(self, busy: Sequence["RayWorker"]) -> list["RayWorker"]:
        ready, _ = ray.wait([each.result for each in busy])
        return [each for each in busy if each.result in ready]


class RayWorker:
    """A worker that is one task of the cluster at a time."""

    def __init__(self, work_name: str, work: ray.ObjectRef) -> None:
        self._work_name, self._work = work_name, work
        self.result: ray.ObjectRef | None = None

    def send(self, task: object, name: Hashable) -> None:
        self.name = name
        # In a list the work stays where it is until somebody asks for it.
        self.result = _remote.remote(self._work_name, [self._work], pickle.dumps(task))

    def outcome(self) -> tuple[bool, object]:
        try:
            return pickle.loads(ray.get(self.result))
        except RayTaskError as error:  # `outcome` lets nothing pass: it did not even begin
            raise Incompatible(
                f"a Ray worker cannot begin ({first_line(error.cause)}): every node needs the same moectl, with all "
                "that it depends on"
            ) from error
        except RayError as error:
            raise OutOfResources(
                f"a Ray worker was lost ({type(error).__name__}), most likely for lack of memory, or with its node: "
                "give fewer --jobs; the same command goes on where it stopped"
            ) from error
        finally:
            self.result = None  # or the cluster would keep what it held until the next task

    def end(self) -> None:
        """What it is at ends with this process's part in the cluster. Ray 2.60 aborts the process that cancels a task
        by force just as it is done."""


def _do(work_name: str, work: list[ray.ObjectRef], task: bytes) -> bytes:
    """In a process of the cluster, which does many tasks one after another."""
    if work_name not in _known:
        torch.set_num_threads(1)
        return_large_buffers()
        _known.clear()
        _known[work_name] = pickle.loads(ray.get(work[0]))
    return pickle.dumps(outcome(_known[work_name], pickle.loads(task)))


_remote = ray.remote(num_cpus=1, max_retries=0)(_do)  # who submits says how often


@contextmanager
def ray_cluster(address: str | None, jobs: int | None) -> Iterator[RayCluster]:
    """Join a cluster, `auto` or HOST:PORT, or without an address start one here of `jobs` CPUs that ends with the
    block; one that this process has joined already is taken as it is. Raises OutOfResources when there is none."""
    if ray.is_initialized():
        yield RayCluster(jobs or _num_cpus())
        return
    with _hushed(), _joined(address) if address else _started(jobs or os.cpu_count() or 1):
        yield RayCluster(jobs or _num_cpus())


@contextmanager
def _joined(address: str) -> Iterator[None]:
    try:
        if address != "auto":  # or Ray would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_PATIENCE_S).close()
        ray.init(address=address, **_QUIET)
    except (OSError, RuntimeError) as error:
        raise OutOfResources(
            f"no Ray cluster at {address} ({first_line(error)}): `ray start --head` begins one, and --executor ray "
            "needs none"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _started(num_cpus: int) -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray has no other switch: nothing is told to anybody
    with tempfile.TemporaryDirectory(prefix="moectl-ray-", ignore_cleanup_errors=True) as folder:
        try:
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, _temp_dir=folder, **_QUIET)
        except (OSError, RuntimeError, ValueError) as error:
            ray.shutdown()
            raise OutOfResources(
                f"Ray cannot begin a cluster here ({first_line(error)}): --executor local does without"
            ) from error
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _hushed() -> Iterator[None]:
    """Of workers that are lost Ray tells on stdout, whatever its log level: who asks hears of them from us."""
    rays_worker._worker_logs_enabled = False
    try:
        yield
    finally:
        rays_worker._worker_logs_enabled = True


def _num_cpus() -> int:
    """Of all nodes together."""
    count = int(ray.cluster_resources().get("CPU", 0))
    if count < 1:
        raise OutOfResources("the Ray cluster has no CPUs: add a node, or give --jobs and wait for one")
    return count
