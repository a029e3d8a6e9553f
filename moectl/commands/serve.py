"""`moectl serve`: an OpenAI-compatible endpoint over a session, and a page that shows what it does."""

import logging
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType

from artifacts.errors import BadInput, BadUsage
from artifacts.quantisation.replicas import check_base
from moectl.bundled import demo_model
from moectl.shared.opening import open_quietly, there
from runtime.model.open import MoeModel
from runtime.policies import build
from runtime.policies.presets import Preset, preset, presets
from runtime.session.presets import tuned_presets
from runtime.session.session import Session, Settings

try:
    import uvicorn

    from moectl.serving.app import Serving, application
    from moectl.serving.guard import LOOPBACK, ServerLimits
    from moectl.serving.scheduler import Scheduler
except ModuleNotFoundError as missing:
    raise BadInput(f"serving needs {missing.name}: pip install 'moectl[serve]'") from None


def serve_command(
    name: str | None,
    settings: Settings,
    limits: ServerLimits,
    *,
    host: str,
    port: int,
    api_key: str | None,
    store: Path,
    base: int,
) -> None:
    """The whole of `moectl serve`: until somebody stops it."""
    check_base(base)
    hosts = _names(host)
    if not hosts and not api_key:
        raise BadUsage(f"--host {host} lets anybody in: give --api-key, or leave it out to serve this machine alone")
    name = name or str(demo_model())
    with _listening(host, port) as listening:
        opened = open_quietly(name, device=settings.device)
        if opened.tokenizer is None:
            raise BadInput("the checkpoint has no tokenizer: put tokenizer.json beside it")
        scheduler = scheduler_of(opened, name, settings, limits, store=store, base=base)
        scheduler.start()
        known = offered(opened, settings, store)
        serving = Serving(scheduler, _called(name), known, api_key=api_key, hosts=hosts)
        at = f"http://{_shown(host)}:{listening.getsockname()[1]}"
        print(f"{_what(serving)}: {at}/v1 for clients, {at}/ for a look", file=sys.stderr, flush=True)
        _run(serving, listening)


def scheduler_of(
    opened: MoeModel, name: str, settings: Settings, limits: ServerLimits, *, store: Path, base: int
) -> Scheduler:
    """Of the model and the presets of a store; it has not been started."""
    known = _presets(opened, settings, store)

    def made(chosen: str) -> Session:
        settled = replace(settings, preset=known[chosen])
        return Session.over(opened, settled, store=there(store), base=base, name=name)

    return Scheduler(made, preset(settings.preset).name, limits)


def offered(opened: MoeModel, settings: Settings, store: Path) -> dict[str, str]:
    """A line on each preset that may be switched to."""
    return {one: _line(found) for one, found in _presets(opened, settings, store).items()}


def _presets(opened: MoeModel, settings: Settings, store: Path) -> dict[str, Preset]:
    """Those that can run, the one that was asked for among them."""
    tuned = [one for one in tuned_presets(store) if one.model_id == opened.fingerprint[:16]]
    named = {one.name: one for one in (*presets().values(), *tuned, preset(settings.preset)) if not one.waits_for}
    return {one: found for one, found in named.items() if "next_use" not in build(found.texts()).requires}


def _line(chosen: Preset) -> str:
    needs = ", ".join(sorted(build(chosen.texts()).requires))
    return f"{chosen.summary}; needs {needs}" if needs else chosen.summary


def _what(serving: Serving) -> str:
    said = serving.scheduler.receipt
    held = f"{said['slots']} of {said['experts']} experts in the fast tier"
    return f"{serving.model} on {said['device']}, preset {said['preset']}, {held}"


class Server(uvicorn.Server):
    """Told to stop, it takes nothing new and waits for what is under way; the scheduler breaks that off in time."""

    def __init__(self, serving: Serving) -> None:
        app = application(serving)
        # What the scheduler has broken off is told to clients; uvicorn would only hang up on them.
        seconds = round(serving.scheduler.limits.closing_s) + _TO_SAY_SO_S
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=seconds))
        self._in_time = threading.Timer(serving.scheduler.limits.closing_s, serving.scheduler.close)
        self._in_time.daemon = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self._in_time.start()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._in_time.cancel()


_TO_SAY_SO_S = 5


def _run(serving: Serving, listening: socket.socket) -> None:
    """Until SIGTERM or Ctrl-C, and until what was under way is answered or its time is up."""
    logging.basicConfig(format="moectl: %(message)s")
    # uvicorn raises its signals once more when it is done, to end what it runs in; here it has ended well.
    signal.signal(signal.SIGTERM, lambda *_: None)
    Server(serving).run(sockets=[listening])


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise BadUsage(f"--host {host} --port {port}: {error.strerror or error}") from None


def _names(host: str) -> tuple[str, ...]:
    """By which this machine's own programs call a server that only they can reach; none where others can."""
    return LOOPBACK if _shown(host) in LOOPBACK else ()


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _called(name: str) -> str:
    """A folder by its own name, what the hub has by all of it."""
    return Path(name).resolve().name if Path(name).exists() else name
