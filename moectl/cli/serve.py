"""The command line of `moectl serve`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from artifacts.errors import BadUsage
from moectl.cli.groups import fill
from moectl.cli.options import (
    DEFAULT_THREADS,
    Base,
    Dense,
    Device,
    Experts,
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

_TURNS = 8  # requests at a time


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of the server: the address to listen on, and the number of requests to take."""

    host: Annotated[str, typer.Option(help="127.0.0.1 is this machine alone.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(envvar="MOECTL_API_KEY", show_envvar=True, help="What clients must send."),
    ] = None
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
        int, typer.Option(min=1, help="Requests that share each pass of the model; 1: none does.")
    ] = 1
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
        int,
        typer.Option(
            min=1, help="The longest answer that may be asked for.", rich_help_panel="Server"
        ),
    ] = 1024

    @property
    def num_rows(self) -> int:
        """Requests answered at a time. Raises BadUsage for turns of requests that share passes."""
        if self.batch == 1:
            return self.rows or _TURNS
        if self.rows:
            raise BadUsage(
                f"--rows {self.rows} is for turns: leave it out, --batch {self.batch} says how "
                "many run"
            )
        return self.batch

    @property
    def kept_nbytes(self) -> int | None:
        """Bytes that kept prompts may take, None by default. Raises BadUsage for turns, which keep
        none."""
        from runtime.control.sizes import nbytes

        if self.kept_prompts and self.batch == 1:
            raise BadUsage(
                "--kept-prompts is for requests that share passes: give --batch N too, or leave "
                "it out"
            )
        return nbytes(self.kept_prompts) if self.kept_prompts else None


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of the served model that say how experts are reached and computed."""

    link: Link = "auto"
    scaled_to: ScaledTo = None
    window: Window = None
    base: Base = 16
    dense: Dense = None
    experts: Experts = "exact"
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
    from moectl.commands.start.serve import server as command

    settings = chosen.settings(
        store, options, model=model, base=options.base, policies=policies.given()
    )
    limits = command.ServerLimits(
        num_rows=server.num_rows,
        shares_passes=server.batch > 1,
        num_waiting=server.queue,
        max_tokens=server.max_new_tokens,
        kept_nbytes=server.kept_nbytes,
    )
    request = fill(
        command.ServeRequest,
        server,
        settings=settings,
        limits=limits,
        store=store,
        base=options.base,
    )
    command.serve_command(model, request)
