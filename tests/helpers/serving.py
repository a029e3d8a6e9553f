"""A server in this process, on a thread and a free port."""

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI, Stream

from moectl.commands.start.serve.server import Server
from moectl.serving.app import Serving
from moectl.serving.guard import LOOPBACK, ServerLimits
from moectl.serving.opening import offered, scheduler_of
from moectl.serving.scheduler import Scheduler
from moectl.shared.opening import Settled
from runtime.model.open import MoeModel
from runtime.session.session import Settings

SETTINGS = Settings(preset="on-demand", budget="25%", threads=1)
EXACT = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True, "counters": True}}


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    scheduler: Scheduler
    server: Server

    def client(self, key: str = "secret") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)

    def stop(self) -> None:
        """Stop the server as SIGTERM does."""
        self.server.handle_exit(signal.SIGTERM, None)


@contextmanager
def serving(
    opened: MoeModel, settings: Settings, limits: ServerLimits, store: Path
) -> Iterator[Running]:
    """Serve `opened` as model `tiny` with the API key `secret`."""
    scheduler = scheduler_of(opened, "tiny", Settled(settings), limits, store=store, base=16)
    scheduler.start()
    server = Server("tiny", limits, api_key="secret", hosts=LOOPBACK)
    server.begin(Serving(scheduler, "tiny", offered(opened, settings, store)))
    with socket.create_server(("127.0.0.1", 0)) as listening, server.answering(listening):
        running = Running(f"http://127.0.0.1:{listening.getsockname()[1]}", scheduler, server)
        try:
            yield running
        finally:
            running.stop()
    assert not scheduler.is_alive


def rest(stream: Stream) -> tuple[str, dict]:
    """The remaining text of a stream, and its counters and times."""
    chunks = list(stream)
    [took] = [chunk.moectl for chunk in chunks if hasattr(chunk, "moectl")]
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), took


def idle(server: Running) -> None:
    """Wait until no request is running or waiting; a disconnect is noticed within a token."""
    end = time.monotonic() + 10
    while server.scheduler.num_running + server.scheduler.num_waiting:
        assert time.monotonic() < end
        time.sleep(0.01)
