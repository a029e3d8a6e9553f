"""`moectl serve`: an OpenAI-compatible endpoint over a session, and a page that shows what it does."""

import errno
import logging
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType

from artifacts.errors import BadInput, BadUsage, OutOfResources
from artifacts.quantisation.replicas import check_base
from moectl.bundled import demo_model
from moectl.shared.opening import existing, open_quietly
from moectl.shared.preset_choice import with_choice
from moectl.shared.text import tokenizer_of
from runtime.model.open import MoeModel
from runtime.policies import build
from runtime.policies.presets import Preset, preset, presets
from runtime.session.presets import tuned_presets
from runtime.session.session import Session, Settings

try:
    import uvicorn

    from moectl.serving.app import Serving, application
    from moectl.serving.guard import LOOPBACK, ServerLimits, host_name
    from moectl.serving.half_closed import HalfClosedProtocol
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
    chooses: bool = False,
) -> None:
    """Do all of `moectl serve`: listen, open the model, and serve until a signal ends it. With `chooses` the preset is
    the best that loses nothing, in place of that of `settings`."""
    check_base(base)
    hosts = _names(host)
    if not hosts and not api_key:
        raise BadUsage(f"--host {host} lets anybody in: give --api-key, or leave it out to serve this machine alone")
    name = name or str(demo_model())
    with _listening(host, port) as listening:
        opened = open_quietly(name, device=settings.device, dense=settings.dense)
        tokenizer_of(opened)
        settings, why = with_choice(opened, settings, existing(store)) if chooses else (settings, "")
        scheduler = scheduler_of(opened, name, settings, limits, store=store, base=base)
        scheduler.start()
        choices = offered(opened, settings, store)
        serving = Serving(scheduler, _called(name), choices, api_key=api_key, hosts=hosts)
        at = f"http://{_shown(host)}:{listening.getsockname()[1]}"
        print(f"{_what(serving, why)}: {at}/v1 for clients, {at}/ for a look", file=sys.stderr, flush=True)
        _run(serving, listening)


def scheduler_of(
    opened: MoeModel, name: str, settings: Settings, limits: ServerLimits, *, store: Path, base: int
) -> Scheduler:
    """Return a scheduler for the model and the presets of a store; the caller starts it."""
    choices = _presets(opened, settings, store)

    def open_session(chosen: str) -> Session:
        chosen_settings = replace(settings, preset=choices[chosen])
        return Session.over(opened, chosen_settings, store=existing(store), base=base, name=name)

    return Scheduler(open_session, preset(settings.preset).name, limits)


def offered(opened: MoeModel, settings: Settings, store: Path) -> dict[str, str]:
    """Return a line about each preset that clients may switch to."""
    return {name: _line(chosen) for name, chosen in _presets(opened, settings, store).items()}


def _presets(opened: MoeModel, settings: Settings, store: Path) -> dict[str, Preset]:
    """Return the presets that can run live, the requested one among them."""
    tuned = [candidate for candidate in tuned_presets(store) if candidate.model_id == opened.fingerprint[:16]]
    candidates = (*presets().values(), *tuned, preset(settings.preset))
    named = {candidate.name: candidate for candidate in candidates if not candidate.waits_for}
    return {name: chosen for name, chosen in named.items() if "next_use" not in build(chosen.texts()).requires}


def _line(chosen: Preset) -> str:
    needs = ", ".join(sorted(build(chosen.texts()).requires))
    return f"{chosen.summary}; needs {needs}" if needs else chosen.summary


def _what(serving: Serving, why: str) -> str:
    receipt, reason = serving.scheduler.receipt, f" ({why})" if why else ""
    in_fast_tier = f"{receipt['slots']} of {receipt['experts']} experts in the fast tier"
    return f"{serving.model} on {receipt['device']}, preset {receipt['preset']}{reason}, {in_fast_tier}"


class Server(uvicorn.Server):
    """After a signal it takes no new requests and waits for running ones; the scheduler breaks them off in time."""

    def __init__(self, serving: Serving) -> None:
        app = application(serving)
        # The scheduler tells clients what it breaks off; uvicorn would only close their connections.
        seconds = round(serving.scheduler.limits.closing_s) + _TO_SAY_SO_S
        config = uvicorn.Config(
            app, http=HalfClosedProtocol, log_config=None, access_log=False, timeout_graceful_shutdown=seconds
        )
        super().__init__(config)
        self._in_time = threading.Timer(serving.scheduler.limits.closing_s, serving.scheduler.close)
        self._in_time.daemon = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self._in_time.start()
            if sig == signal.SIGINT:
                seconds = f"{self._in_time.interval:.0f} s"
                print(f"answers under way have {seconds} to end; Ctrl-C again breaks them off", file=sys.stderr)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._in_time.cancel()


_TO_SAY_SO_S = 5


def _run(serving: Serving, listening: socket.socket) -> None:
    """Serve until SIGTERM, Ctrl-C or the end of the terminal, then until running requests end or their time is up."""
    logging.basicConfig(format="moectl: %(message)s")
    # After its shutdown uvicorn raises the signal again, which would end this process with an error.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server = Server(serving)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, server.handle_exit)
    server.run(sockets=[listening])


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OutOfResources(
                f"port {port} of {host} is in use by another server: end that one, or give another --port"
            ) from None
        raise BadUsage(f"--host {host} --port {port}: {error.strerror or error}") from None


def _names(host: str) -> tuple[str, ...]:
    """Return the host names by which local programs call a server that only they can reach, none if others can."""
    return LOOPBACK if host_name(_shown(host)) in LOOPBACK else ()


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _called(name: str) -> str:
    """Return the base name of a folder, the whole id of a model from the hub."""
    return Path(name).resolve().name if Path(name).exists() else name
