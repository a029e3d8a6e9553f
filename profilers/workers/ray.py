"""Workers on a Ray cluster: the same tasks as processes of one machine do, on all machines of the
cluster.

A worker is a place in the cluster's queue; Ray chooses where its task runs. Tasks and results are
pickled, as they are between processes: arrays then belong to the task and are not views of
read-only memory.
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
from profilers.workers.workers import Work, outcome, return_large_buffers

_QUIET = {"logging_level": logging.ERROR, "log_to_driver": False}
_CONNECT_TIMEOUT_S = 10.0
_work_by_name: dict[str, Work] = {}  # in a process of the cluster: the work of its last task


class RayCluster:
    """An executor of `count` tasks at a time on the cluster that this process has joined."""

    is_here = False

    def __init__(self, count: int) -> None:
        self.count = count
        self.most_together = min(
            count, max(int(node["Resources"].get("CPU", 1)) for node in ray.nodes())
        )
        self._stored: dict[int, tuple[Work, str, ray.ObjectRef]] = {}

    def start(self, work: Work) -> "RayWorker":
        """Start a worker. The work is sent to the cluster once, and to each of its processes with
        the first task."""
        if id(work) not in self._stored:
            self._stored[id(work)] = work, uuid4().hex, ray.put(pickle.dumps(work))
        _, name, reference = self._stored[id(work)]
        return RayWorker(name, reference)

    def ready(self, busy: Sequence["RayWorker"]) -> list["RayWorker"]:
        ready, _ = ray.wait([worker.result for worker in busy])
        return [worker for worker in busy if worker.result in ready]


class RayWorker:
    """A worker that does one task of the cluster at a time."""

    def __init__(self, work_name: str, work: ray.ObjectRef) -> None:
        self._work_name = work_name
        self._work = work
        self.result: ray.ObjectRef | None = None

    def send(self, task: object, name: Hashable) -> None:
        self.name = name
        # Ray fetches an argument before the task begins, but not a reference inside a list.
        self.result = _remote.remote(self._work_name, [self._work], pickle.dumps(task))

    def outcome(self) -> tuple[bool, object]:
        try:
            return pickle.loads(ray.get(self.result))
        except (
            RayTaskError
        ) as error:  # `outcome` catches all exceptions of the work, so the task never began
            raise Incompatible(
                f"a Ray worker cannot begin ({first_line(error.cause)}): every node needs the "
                "same moectl, with all that it depends on"
            ) from error
        except RayError as error:
            raise OutOfResources(
                f"a Ray worker was lost ({type(error).__name__}), most likely for lack of memory, "
                "or with its node: give fewer --jobs; the same command goes on where it stopped"
            ) from error
        finally:
            self.result = None  # otherwise the cluster would keep the result until the next task

    def end(self) -> None:
        """Do nothing: the task ends when this process leaves the cluster. Cancelling by force is no
        option, since Ray 2.60 aborts the process that cancels a task at the moment when it
        completes."""


def _do(work_name: str, work: list[ray.ObjectRef], task: bytes) -> bytes:
    """Do a task, in a process of the cluster that does many tasks one after another."""
    if work_name not in _work_by_name:
        torch.set_num_threads(1)
        return_large_buffers()
        _work_by_name.clear()
        _work_by_name[work_name] = pickle.loads(ray.get(work[0]))
    return pickle.dumps(outcome(_work_by_name[work_name], pickle.loads(task)))


_remote = ray.remote(num_cpus=1, max_retries=0)(_do)  # `Workers` decides on retries


@contextmanager
def ray_cluster(address: str | None, jobs: int | None) -> Iterator[RayCluster]:
    """Join the cluster at `auto` or HOST:PORT. Without an address start one here of `jobs` CPUs
    that ends with the block. A cluster that this process has joined already is used as it is.
    Raises OutOfResources when none answers."""
    if ray.is_initialized():
        yield RayCluster(jobs or _num_cpus())
        return
    with _hushed(), _joined(address) if address else _started(jobs or os.cpu_count() or 1):
        yield RayCluster(jobs or _num_cpus())


@contextmanager
def _joined(address: str) -> Iterator[None]:
    try:
        if address != "auto":  # without this check Ray would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        ray.init(address=address, **_QUIET)
    except (OSError, RuntimeError) as error:
        raise OutOfResources(
            f"no Ray cluster at {address} ({first_line(error)}): `ray start --head` begins one, "
            "and --executor ray needs none"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _started(num_cpus: int) -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # the only way to turn usage reports off
    with tempfile.TemporaryDirectory(prefix="moectl-ray-", ignore_cleanup_errors=True) as folder:
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                _temp_dir=folder,
                **_QUIET,
            )
        except (OSError, RuntimeError, ValueError) as error:
            ray.shutdown()
            raise OutOfResources(
                f"Ray cannot begin a cluster here ({first_line(error)}): --executor local does "
                "without"
            ) from error
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _hushed() -> Iterator[None]:
    """Keep Ray from printing lost workers on stdout, which it does at every log level; `Workers`
    reports them."""
    rays_worker._worker_logs_enabled = False
    try:
        yield
    finally:
        rays_worker._worker_logs_enabled = True


def _num_cpus() -> int:
    """Return the number of CPUs of all nodes together."""
    count = int(ray.cluster_resources().get("CPU", 0))
    if count < 1:
        raise OutOfResources(
            "the Ray cluster has no CPUs: add a node, or give --jobs and wait for one"
        )
    return count
