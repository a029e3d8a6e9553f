"""`moectl serve`: an OpenAI-compatible endpoint over a session, and a page that shows what it
does."""

import asyncio
import errno
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from artifacts.errors import BadInput, BadUsage, OutOfResources, first_line
from moectl.bundled import demo_model
from moectl.shared.importing import importing
from runtime.policies.presets import preset

try:
    import uvicorn

    from moectl.serving.connections import HalfClosedProtocol
    from moectl.serving.front import Front
    from moectl.serving.guard import Guard, ServerLimits
    from moectl.serving.request import ServeRequest
    from moectl.serving.wire import shown
except ModuleNotFoundError as missing:
    raise BadInput(f"serving needs {missing.name}: pip install 'moectl[serve]'") from None

if TYPE_CHECKING:
    from moectl.serving.app import Serving


def serve_command(name: str | None, request: ServeRequest) -> None:
    """Do all of `moectl serve`: serve a model until a signal ends it."""
    logging.basicConfig(format="moectl: %(message)s")
    name = name or str(demo_model())
    with _listening(request.host, request.port) as listening:
        request = replace(request, port=listening.getsockname()[1])
        if request.replicas is None:
            _serve(name, request, listening)
    if request.replicas is not None:
        _serve_replicas(name, request)  # the port is free: Ray's proxy takes it


def _serve(name: str, request: ServeRequest, listening: socket.socket) -> None:
    """Show the page at once, open the model meanwhile, and serve."""
    model = _called(name)
    settings = request.settings
    at = _address(request)
    server = Server(model, request.limits, api_key=request.api_key, hosts=request.hosts)
    with server.answering(listening):
        _say(f"{model} is loading; its page is there: {at}/")
        with importing():
            from moectl.serving.opening import open_serving
            from moectl.shared.opening import open_quietly
            from moectl.show.answers import tell_fallbacks
        opened = open_quietly(name, device=settings.device, dense=settings.dense)
        serving = open_serving(opened, name, request, model=model)
        server.begin(serving)
        server.heed_signals()
        _say(f"{_what(serving)}: {at}/v1 for clients, {at}/ to chat and to watch")
        tell_fallbacks(serving.scheduler.receipt["fallbacks"])
        server.wait()


def _serve_replicas(name: str, request: ServeRequest) -> None:
    """Serve on a Ray cluster. Raises BadUsage without Ray Serve, and for an executor that is not
    Ray."""
    model = _called(name)
    at = _address(request)
    with importing():
        from moectl.shared.opening import existing, open_quietly
        from moectl.shared.preset_choice import with_choice
        from profilers.workers.choose import LOCAL, check_executor
        from profilers.workers.same_model import SameModel
    check_executor(request.executor)
    if request.executor == LOCAL:
        raise BadUsage("--replicas run on Ray: give --executor ray, ray:auto or ray:HOST:PORT")
    try:
        from moectl.serving.replicas import ReplicaSpec, ending, replicas
    except ImportError as missing:
        raise BadUsage(
            f"--replicas need Ray Serve ({first_line(missing)}): pip install 'moectl[ray]'"
        ) from None
    opened = open_quietly(name, device="cpu", dense=request.settings.dense)
    settings, why = with_choice(opened, request.settings, existing(request.store))
    spec = ReplicaSpec(SameModel.of(name, opened), model, replace(request, settings=settings))
    _say(f"{request.replicas} replicas of {model} are loading")
    with replicas(spec), ending() as wait:
        chosen = f"preset {preset(settings.preset).name}" + (f" ({why})" if why else "")
        _say(
            f"{request.replicas} replicas of {model} behind Ray Serve, {chosen}: {at}/v1 for "
            f"clients, {at}/ to chat"
        )
        wait()


def _address(request: ServeRequest) -> str:
    return f"http://{request.shown_host}:{request.port}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _what(serving: "Serving") -> str:
    receipt = serving.scheduler.receipt
    reason = f" ({serving.why})" if serving.why else ""
    in_fast_tier = f"{receipt['slots']} of {receipt['experts']} experts in the fast tier"
    from moectl.show.render import human_bytes

    most = serving.scheduler.kept.most_nbytes
    kept = ""
    if most:
        kept = f", at most {human_bytes(most)} of prompts kept for their beginnings"
    return (
        f"{serving.model} on {receipt['device']}, preset {receipt['preset']}{reason}, "
        f"{in_fast_tier}{kept}"
    )


class Server(uvicorn.Server):
    """Answers from its start, and from `begin` on with a model. After a signal it takes no new
    requests and waits for running ones; the scheduler breaks them off in time."""

    def __init__(
        self, model: str, limits: ServerLimits, *, api_key: str | None, hosts: tuple[str, ...]
    ) -> None:
        self.front = Front(model)
        guard = Guard(self.front, api_key=api_key, hosts=hosts, body_nbytes=limits.body_nbytes)
        # The scheduler tells clients what it breaks off; uvicorn would only close their
        # connections.
        seconds = round(limits.closing_s) + _TO_SAY_SO_S
        config = uvicorn.Config(
            guard,
            http=partial(HalfClosedProtocol, limits=limits),
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=seconds,
        )
        super().__init__(config)
        self._closing_s = limits.closing_s
        self._close = lambda: None
        self._in_time: threading.Timer | None = None
        self._told: list[int] = []  # signals
        self._thread: threading.Thread

    @contextmanager
    def answering(self, listening: socket.socket) -> Iterator[None]:
        """Answer on a thread of its own, so that the caller can open a model meanwhile."""
        self._thread = threading.Thread(
            target=self.run, args=([listening],), name="moectl-http", daemon=True
        )
        self._thread.start()
        try:
            yield
        finally:
            self.should_exit = True
            self._thread.join()

    def begin(self, serving: "Serving") -> None:
        """Answer with a model from here on, whose scheduler was started; the end of the server
        closes it."""
        from moectl.serving.app import application

        self._close = serving.scheduler.close
        self.front.begin(application(serving), lambda: serving.scheduler.is_alive)

    def heed_signals(self) -> None:
        """Have SIGTERM, Ctrl-C or the end of the terminal end the server, from here on."""

        def end(sig: int, frame: FrameType | None) -> None:
            self._told.append(sig)
            self.handle_exit(sig, frame)

        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(sig) is not signal.SIG_IGN:  # as under nohup
                signal.signal(sig, end)

    def wait(self) -> None:
        """Serve until a signal, then until running requests end or their time is up. Raises
        KeyboardInterrupt after Ctrl-C."""
        self._thread.join()
        if signal.SIGINT in self._told:
            raise KeyboardInterrupt

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self._in_time = threading.Timer(self._closing_s, self._close)
            self._in_time.daemon = True
            self._in_time.start()
            if sig == signal.SIGINT:
                seconds = f"{self._in_time.interval:.0f} s"
                print(
                    f"answers under way have {seconds} to end; Ctrl-C again breaks them off",
                    file=sys.stderr,
                )
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._in_time is not None:
            self._in_time.cancel()
        await asyncio.to_thread(self._close)


_TO_SAY_SO_S = 5


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OutOfResources(
                f"port {port} of {host} is in use by another server: end that one, or give "
                "another --port"
            ) from None
        raise BadUsage(f"--host {host} --port {port}: {error.strerror or error}") from None


def _called(name: str) -> str:
    """Return the base name of a folder, the whole id of a model from the hub; what cannot be shown
    is escaped."""
    return shown(Path(name).resolve().name if Path(name).exists() else name)
