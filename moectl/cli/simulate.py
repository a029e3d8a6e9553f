"""The command line of `moectl simulate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from moectl.cli import completion
from moectl.cli.groups import fill
from moectl.cli.options import (
    AvgBits,
    Base,
    Budget,
    Clients,
    Dense,
    Devices,
    Json,
    PolicyOptions,
    Preset,
    ReconfigureEvery,
    Scope,
    Seed,
    StorePath,
    Window,
    known_machine,
)
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing, of_clone


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The trace to replay, and the model and machine that it is replayed for."""

    trace: Annotated[
        Path | None,
        typer.Option(
            help="A Parquet trace, as `moectl run --trace` writes it; or gpt-oss-20b, bundled."
        ),
    ] = None
    run: Annotated[
        int | None,
        typer.Option(
            "--run", min=1, help="A run of the store that kept its trace; else the newest."
        ),
    ] = None
    synthetic: Annotated[
        str | None, typer.Option(help="Make a trace by dials: skew=0.8,locality=0.4,...")
    ] = None
    num_experts: Annotated[int | None, typer.Option(help="Experts of a layer.")] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="Whose shape: a name as mixtral-8x7b, a folder with a config.json, or bundled."
        ),
    ] = None
    machine: Annotated[
        str,
        typer.Option(
            help="Whose bandwidths; `moectl inspect machines` lists them; "
            "NAME:load=14ms,layer=1ms,head=1ms: by times; here: as profiled.",
            autocompletion=completion.machines,
            callback=known_machine,
        ),
    ] = "a100-pcie4"


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of a replay: several settings or a paper's figures in place of one preset, and the
    fast tier."""

    compare: Annotated[
        str | None,
        typer.Option(help="Several instead of one: names of presets or eviction policies, a,b,c."),
    ] = None
    reproduce: Annotated[
        str | None,
        typer.Option(
            help=(
                "A paper's figures: moepic-table1, moepic, specmd, buddymoe, context-aware or fmoe."
            )
        ),
    ] = None
    budget: Budget = "25%"
    scope: Scope = None
    devices: Devices = 1
    window: Window = None
    reconfigure_every: ReconfigureEvery = None
    base: Base = 16
    dense: Dense = None
    clients: Clients = None
    chunk: Annotated[
        int | None, typer.Option(help="With --clients: tokens of prompts read in a pass.")
    ] = None
    seed: Seed = 0
    serving: Annotated[
        str,
        typer.Option(
            help="How a step is served: pinned, as in a run; unprotected, proposals may be evicted "
            "for others; one_by_one, as in SpecMD's framework."
        ),
    ] = "pinned"


def simulate(
    *,
    source: TraceOptions,
    preset: Preset = "on-demand",
    policies: PolicyOptions,
    avg_bits: AvgBits = None,
    replay: ReplayOptions,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Replay a trace through policies, in virtual time.

    Loading on demand and the oracle, which knows the future, stand beside.
    """
    if replay.reproduce is not None:
        _reproduce(source, replay, as_json=json)
        return
    with importing():
        from artifacts.traces.clients import clients_of
        from moectl.commands.measure import simulate as command
    from moectl.shared.names import names_in
    from moectl.shared.trace_source import TraceSource

    clients = clients_of(replay.clients, replay.chunk, seed=replay.seed)
    named = [preset, *names_in(replay.compare or "")]
    request = fill(
        command.SimulateRequest,
        source,
        replay,
        preset=preset,
        policies=policies.given(avg_bits),
        clients=clients,
        stored=command.find_presets(named, store),
    )
    command.show(command.simulate(fill(TraceSource, source, store=store), request), as_json=json)


def _reproduce(source: TraceOptions, replay: ReplayOptions, *, as_json: bool) -> None:
    with importing():
        command = of_clone("tools.reproductions.command", "--reproduce")
    others = (source.run, source.synthetic, source.num_experts, source.model, replay.compare)
    is_other = any(option is not None for option in others)
    command.show(
        command.reproduce(replay.reproduce, trace=source.trace, other_options=is_other),
        as_json=as_json,
    )
