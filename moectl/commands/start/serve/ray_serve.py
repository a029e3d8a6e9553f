"""Replicas of a server on a Ray cluster, behind Ray Serve, which passes each request on to one of
them."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from ray import serve
from starlette.types import ASGIApp, Receive, Scope, Send

from moectl.serving.app import application
from moectl.serving.front import Front
from moectl.serving.guard import guarded
from moectl.serving.opening import open_serving
from moectl.serving.request import ServeRequest
from profilers.workers.ray import ray_cluster
from profilers.workers.same_model import SameModel

_NAME = "moectl"
# requests to a replica besides those that are answered or wait: /health, /metrics, the page
_WATCHING = 16
_MOST_ROWS = 256
_TO_SAY_SO_S = 5
_QUIET = {"log_level": "ERROR", "enable_access_log": False}


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Specification of a replica: the model that it serves, the name `called` that clients use for
    it, and the request of the command."""

    model: SameModel
    called: str
    request: ServeRequest


class Replica:
    """A server without a port: Ray Serve hands it requests, asks whether it is healthy, and ends
    it.

    Raises Incompatible where the model's name leads to another model on its node.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        logging.basicConfig(format="moectl: %(message)s")
        self._spec = spec
        request = spec.request
        settings = request.settings
        opened = spec.model.open(device=settings.device, dense=settings.dense)
        self._serving = open_serving(opened, spec.model.name, request, model=spec.called)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        scheduler = self._serving.scheduler
        request = self._spec.request
        # A switch would reach one replica of many.
        serving = replace(
            self._serving, presets={scheduler.preset: self._serving.presets[scheduler.preset]}
        )
        front = Front(self._spec.called)
        front.begin(application(serving), lambda: scheduler.is_alive)
        nbytes = request.limits.body_nbytes
        return _WithState(
            guarded(
                front,
                api_key=request.api_key,
                hosts=request.hosts,
                body_nbytes=nbytes,
                origins=request.cors_origin,
            )
        )

    def check_health(self) -> None:
        """Raises RuntimeError once no request can be answered any more: Ray Serve then starts
        another replica."""
        if not self._serving.scheduler.is_alive:
            raise RuntimeError("the scheduler has ended")

    def __del__(self) -> None:
        if hasattr(self, "_serving"):
            self._serving.scheduler.close()


class _WithState:
    """Gives a request the state that uvicorn gives it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({"state": {}, **scope}, receive, send)


@contextmanager
def replicas(spec: ReplicaSpec) -> Iterator[None]:
    """Run replicas until the block ends; requests under way then have their time to end, and no new
    ones are taken.

    Raises OutOfResources where there is no cluster, RuntimeError where a replica cannot begin.
    """
    request = spec.request
    threads = request.settings.threads
    is_gpu = request.settings.device.startswith("cuda")
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name=_NAME,
        num_replicas=request.replicas,
        max_ongoing_requests=_MOST_ROWS + request.limits.num_waiting + _WATCHING,
        graceful_shutdown_timeout_s=request.limits.closing_s + _TO_SAY_SO_S,
        ray_actor_options={"num_cpus": threads, "num_gpus": int(is_gpu)},
        logging_config=_QUIET,
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    at = {"host": request.host, "port": request.port}
    with ray_cluster(request.executor.partition(":")[2] or None, request.replicas * threads):
        serve.start(proxy_location="HeadOnly", http_options=at, logging_config=_QUIET)
        try:
            serve.run(deployment.bind(spec), name=_NAME, route_prefix="/", logging_config=_QUIET)
            yield
        finally:
            serve.delete(_NAME)
            serve.shutdown()


@contextmanager
def ending() -> Iterator[Callable[[], None]]:
    """Lend a function that waits for SIGTERM, Ctrl-C or the end of the terminal, and raises
    KeyboardInterrupt after Ctrl-C. Enter it within the cluster: Ray has handlers of its own, which
    end the process at once."""
    told: list[int] = []
    ended = threading.Event()

    def end(sig: int, frame: FrameType | None) -> None:
        told.append(sig)
        ended.set()

    def wait() -> None:
        ended.wait()
        if signal.SIGINT in told:
            raise KeyboardInterrupt

    before = {sig: signal.getsignal(sig) for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        for sig, handler in before.items():
            if handler is not signal.SIG_IGN:  # as under nohup
                signal.signal(sig, end)
        yield wait
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
