"""A server as it runs, in this process: uvicorn on a thread, on a free port."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from openai import OpenAI

from moectl.commands.serve import LOOPBACK, Limits, offered, scheduler_of
from moectl.serving.app import Serving, application
from moectl.serving.scheduler import Scheduler
from runtime.model import MoeModel
from runtime.session import Settings


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    scheduler: Scheduler

    def client(self, key: str = "secret") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)


@contextmanager
def serving(opened: MoeModel, settings: Settings, limits: Limits, store: Path) -> Iterator[Server]:
    """Serves `opened` as model `tiny`, for whoever has the key `secret`."""
    scheduler = scheduler_of(opened, "tiny", settings, limits, store=store, base=16)
    scheduler.start()
    what = Serving(scheduler, "tiny", offered(opened, settings, store), api_key="secret", hosts=LOOPBACK)
    server = uvicorn.Server(uvicorn.Config(application(what), port=0, log_config=None, timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    [listening] = server.servers[0].sockets
    try:
        yield Server(f"http://127.0.0.1:{listening.getsockname()[1]}", scheduler)
    finally:
        server.should_exit = True
        thread.join()
        assert not scheduler.is_alive
