"""The server of `moectl serve`, on a thread of its own: it answers before there is a model, and
ends in time."""

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from moectl.commands.start.serve.connections import HalfClosedProtocol
from moectl.serving.front import Front
from moectl.serving.guard import ServerLimits, guarded

if TYPE_CHECKING:
    from moectl.serving.app import Serving

_TO_SAY_SO_S = 5


class Server(uvicorn.Server):
    """Answers from its start, and from `begin` on with a model. After a signal it takes no new
    requests and waits for running ones; the scheduler breaks them off in time."""

    def __init__(
        self,
        model: str,
        limits: ServerLimits,
        *,
        api_key: str | None,
        hosts: tuple[str, ...],
        origins: tuple[str, ...] = (),
    ) -> None:
        self.front = Front(model)
        nbytes = limits.body_nbytes
        app = guarded(self.front, api_key=api_key, hosts=hosts, body_nbytes=nbytes, origins=origins)
        # The scheduler tells clients what it breaks off; uvicorn would only close their
        # connections.
        seconds = round(limits.closing_s) + _TO_SAY_SO_S
        config = uvicorn.Config(
            app,
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
