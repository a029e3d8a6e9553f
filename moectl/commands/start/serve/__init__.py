"""`moectl serve`: an OpenAI-compatible endpoint over a session, and a page that shows what it
does."""

import errno
import logging
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from artifacts.errors import BadInput, BadUsage, OutOfResources, first_line
from moectl.bundled import demo_model
from moectl.cli.groups import fill
from moectl.cli.options import (
    DEFAULT_THREADS,
    Activations,
    Base,
    Dense,
    Device,
    Draft,
    Experts,
    KvCacheDtype,
    Link,
    Model,
    PolicyOptions,
    PresetOptions,
    ScaledTo,
    StorePath,
    Threads,
    Window,
)
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing

if TYPE_CHECKING:
    from moectl.serving.app import Serving
    from moectl.serving.guard import ServerLimits
    from moectl.serving.request import ServeRequest

_AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of the server: the address to listen on, and the number of requests to take."""

    host: Annotated[str, typer.Option(help="127.0.0.1 is this machine alone.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(envvar="MOECTL_API_KEY", show_envvar=True, help="What clients must send."),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default="the model's",
            help="What clients call the model; repeat it for other names.",
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Web pages that may ask, as http://localhost:3000; repeatable; *: all.",
        ),
    ] = None
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse unknown options of a request.")
    ] = False
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1, help="Servers behind Ray Serve, each with the budget; else this process."
        ),
    ] = None
    executor: Annotated[
        str,
        typer.Option(help="Where those run: ray (a cluster begun here), ray:auto, ray:HOST:PORT."),
    ] = "ray"
    batch: Annotated[
        str,
        typer.Option(
            metavar="N",
            help="Requests that share each pass; 1: none does; auto: if a lone one is as fast.",
            rich_help_panel="Server",
        ),
    ] = _AUTO
    ctx_size: Annotated[
        int | None,
        typer.Option(
            "-c",
            "--ctx-size",
            min=1,
            show_default="the model's",
            help="Tokens of a prompt and its answer, at most.",
        ),
    ] = None
    rows: Annotated[
        int | None,
        typer.Option(
            min=1, show_default="8", help="With --batch 1: requests answered at a time, in turns."
        ),
    ] = None
    kept_prompts: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            show_default="an eighth of keys and values",
            help="With --batch N: prompts kept for those that begin alike.",
        ),
    ] = None
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait besides.")] = 64
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--max-new-tokens",
            min=1,
            show_default="the model's",
            help="The longest answer that may be asked for.",
            rich_help_panel="Server",
        ),
    ] = None

    def limits(self) -> "ServerLimits":
        """Return the limits of the server. Raises BadUsage for a batch that is no number, for turns
        of requests that share passes, and for kept prompts of turns, which keep none."""
        from moectl.serving.guard import TURNS, ServerLimits
        from runtime.control.sizes import nbytes

        if self.batch != _AUTO and not (self.batch.isdecimal() and int(self.batch)):
            raise BadUsage(f"--batch {self.batch}: give a number of requests, or auto")
        takes_turns = self.batch == "1"
        if self.rows and not takes_turns:
            raise BadUsage(f"--rows {self.rows} is for turns: give --batch 1 too, or leave it out")
        if self.kept_prompts and self.batch in ("1", _AUTO):
            raise BadUsage(
                "--kept-prompts is for requests that share passes: give --batch N too, or leave "
                "it out"
            )
        shared = None if self.batch == _AUTO else int(self.batch)
        return ServerLimits(
            num_rows=(self.rows or TURNS) if takes_turns else shared,
            shares_passes=not takes_turns,
            num_waiting=self.queue,
            max_tokens=self.max_new_tokens,
            num_positions=self.ctx_size,
            kept_nbytes=nbytes(self.kept_prompts) if self.kept_prompts else None,
        )


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of the served model that say how experts are reached and computed."""

    link: Link = "auto"
    scaled_to: ScaledTo = None
    window: Window = None
    base: Base = 16
    dense: Dense = None
    kv_cache_dtype: KvCacheDtype = "auto"
    experts: Experts = "auto"
    activations: Activations = None
    draft: Draft = "none"
    device: Device = "auto"
    threads: Threads = DEFAULT_THREADS


def serve(
    *,
    model: Model = None,
    server: ServerOptions,
    chosen: PresetOptions,
    policies: PolicyOptions,
    options: ServeOptions,
    store: StorePath = DEFAULT_STORE,
) -> None:
    """Serve a model to OpenAI's clients, with a page to watch it.

    The page shows what cache and link do. It needs the extra `serve`.
    """
    try:
        import moectl.commands.start.serve.server  # noqa: F401
        from moectl.serving.request import ServeRequest
    except ModuleNotFoundError as missing:
        raise BadInput(f"serving needs {missing.name}: pip install 'moectl[serve]'") from None

    settings = chosen.settings(
        store, options, model=model, base=options.base, policies=policies.given(), decide="auto"
    )
    limits = server.limits()
    request = fill(
        ServeRequest,
        server,
        settings=settings,
        limits=limits,
        store=store,
        base=options.base,
        served_model_name=tuple(server.served_model_name or ()),
        cors_origin=tuple(server.cors_origin or ()),
    )
    logging.basicConfig(format="moectl: %(message)s")
    name = model or str(demo_model())
    with _listening(request.host, request.port) as listening:
        request = replace(request, port=listening.getsockname()[1])
        if request.replicas is None:
            _serve(name, request, listening)
    if request.replicas is not None:
        _serve_replicas(name, request)  # the port is free: Ray's proxy takes it


def _serve(name: str, request: "ServeRequest", listening: socket.socket) -> None:
    """Show the page at once, open the model meanwhile, and serve."""
    from moectl.commands.start.serve.server import Server

    model = _called(name, request)
    settings = request.settings
    at = _address(request)
    server = Server(
        model,
        request.limits,
        api_key=request.api_key,
        hosts=request.hosts,
        origins=request.cors_origin,
    )
    with server.answering(listening):
        _say(f"{model} is loading; its page is there: {at}/")
        with importing():
            from moectl.serving.opening import open_serving
            from moectl.shared.opening import open_quietly
            from moectl.show.answers import tell_fallbacks
            from moectl.show.waiting import reading
        with reading(name):
            opened = open_quietly(name, device=settings.device, dense=settings.dense)
            serving = open_serving(opened, name, request, model=model)
        server.begin(serving)
        server.heed_signals()
        _say(f"{_what(serving)}: {at}/v1 for clients, {at}/ to chat and to watch")
        tell_fallbacks(serving.scheduler.receipt["fallbacks"])
        server.wait()


def _serve_replicas(name: str, request: "ServeRequest") -> None:
    """Serve on a Ray cluster. Raises BadUsage without Ray Serve, and for an executor that is not
    Ray."""
    model = _called(name, request)
    at = _address(request)
    with importing():
        from moectl.shared.opening import open_quietly
        from profilers.workers.choose import LOCAL, check_executor
        from profilers.workers.same_model import SameModel
        from runtime.policies.presets import preset
    check_executor(request.executor)
    if request.executor == LOCAL:
        raise BadUsage("--replicas run on Ray: give --executor ray, ray:auto or ray:HOST:PORT")
    try:
        from moectl.commands.start.serve.ray_serve import ReplicaSpec, ending, replicas
    except ImportError as missing:
        raise BadUsage(
            f"--replicas need Ray Serve ({first_line(missing)}): pip install 'moectl[ray]'"
        ) from None
    opened = open_quietly(name, device="cpu", dense=request.settings.dense)
    spec = ReplicaSpec(SameModel.of(name, opened), model, request)
    _say(f"{request.replicas} replicas of {model} are loading")
    with replicas(spec), ending() as wait:
        _say(
            f"{request.replicas} replicas of {model} behind Ray Serve, preset "
            f"{preset(request.settings.preset).name}: {at}/v1 for clients, {at}/ to chat"
        )
        wait()


def _address(request: "ServeRequest") -> str:
    return f"http://{request.shown_host}:{request.port}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _what(serving: "Serving") -> str:
    from moectl.show.render import human_bytes

    receipt = serving.scheduler.receipt
    reason = f" ({serving.why})" if serving.why else ""
    in_fast_tier = f"{receipt['slots']} of {receipt['experts']} experts in the fast tier"
    scheduler = serving.scheduler
    most = scheduler.kept.most_nbytes
    kept = ""
    if most:
        kept = f", at most {human_bytes(most)} of prompts kept for their beginnings"
    longest = f", {scheduler.num_positions:,} positions" if scheduler.num_positions else ""
    return (
        f"{serving.model} on {receipt['device']}, preset {receipt['preset']}{reason}, "
        f"{in_fast_tier}, {scheduler.sharing}{longest}{kept}"
    )


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


def _called(name: str, request: "ServeRequest") -> str:
    """Return the name that the user chose, else the base name of a folder, the whole id of a model
    from the hub; what cannot be shown is escaped."""
    from moectl.serving.wire import shown

    if request.served_model_name:
        return request.served_model_name[0]
    return shown(Path(name).resolve().name if Path(name).exists() else name)
