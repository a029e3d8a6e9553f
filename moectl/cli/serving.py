"""The command that serves a model."""

from typing import Annotated

import typer

from moectl.cli.app import app
from moectl.cli.options import (
    DEFAULT_THREADS,
    Base,
    Budget,
    Device,
    Eviction,
    Experts,
    Link,
    Miss,
    Model,
    Prefetch,
    Preset,
    Residency,
    Routing,
    ScaledTo,
    Scope,
    StorePath,
    Threads,
    Window,
)
from moectl.shared.defaults import DEFAULT_STORE


@app.command("serve")
def _serve(
    model: Model = None,
    host: Annotated[str, typer.Option(help="Where to listen; by default for this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="MOECTL_API_KEY", show_envvar=True, help="What clients must send.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Requests that are answered at a time, in turns.")] = 8,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait besides; more are sent away.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer that may be asked for.")] = 1024,
    preset: Preset = "on-demand",
    budget: Budget = "25%",
    scope: Scope = None,
    routing: Routing = None,
    prefetch: Prefetch = None,
    eviction: Eviction = None,
    miss: Miss = None,
    residency: Residency = None,
    link: Link = "auto",
    scaled_to: ScaledTo = None,
    window: Window = None,
    base: Base = 16,
    experts: Experts = "exact",
    device: Device = "auto",
    threads: Threads = DEFAULT_THREADS,
    store: StorePath = DEFAULT_STORE,
) -> None:
    """Serve a model to OpenAI's clients, and a page that shows what its cache and link do (extra: serve)."""
    from moectl.commands import serve as verb
    from runtime.session.presets import find_presets

    policies = {"routing": routing, "prefetch": prefetch, "eviction": eviction, "miss": miss, "residency": residency}
    settings = verb.Settings(
        preset=find_presets([preset], store).get(preset, preset),
        policies={axis: text for axis, text in policies.items() if text is not None},
        budget=budget,
        scope=scope,
        link=link,
        scaled_to=scaled_to,
        window=window,
        experts=experts,
        device=device,
        threads=threads,
    )
    limits = verb.ServerLimits(num_rows=rows, num_waiting=queue, max_tokens=max_new_tokens)
    verb.serve_command(model, settings, limits, host=host, port=port, api_key=api_key, store=store, base=base)
