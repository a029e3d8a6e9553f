"""`moectl simulate`: replay a trace through the policies on virtual time, beside on-demand loading
and the oracles."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from artifacts.errors import BadUsage
from artifacts.formats.dense import check_dense
from artifacts.hardware.machines import HERE
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
    NumExperts,
    OfTrace,
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
from moectl.shared.names import names_in
from moectl.shared.terminal.resuming import resumable
from moectl.shared.timed_machine import timed_machine
from runtime.control import sizes

if TYPE_CHECKING:
    from artifacts.traces.clients import Clients as TraceClients
    from moectl.commands.measure.simulate.table import Simulated
    from moectl.shared.trace_source import TraceSource
    from runtime.policies.presets import Preset as NamedPreset
    from runtime.replay.settings import Setting
    from runtime.replay.workload import Workload


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The trace to replay, and the model and machine that it is replayed for."""

    trace: Annotated[
        Path | None,
        typer.Option(
            help="A Parquet trace, as `moectl run --trace` writes it; or gpt-oss-20b, bundled."
        ),
    ] = None
    run: OfTrace = None
    synthetic: Annotated[
        str | None, typer.Option(help="Make a trace by dials: skew=0.8,locality=0.4,...")
    ] = None
    num_experts: NumExperts = None
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
    drafts: Annotated[
        str | None,
        typer.Option(help="Verify so many drafts in a pass, as 0-8: which number is fastest."),
    ] = None
    acceptance: Annotated[
        str, typer.Option(help="With --drafts: how probably a draft is right, .7 or .8,.7,.5.")
    ] = ".7"
    draft_ms: Annotated[
        float, typer.Option(min=0, help="With --drafts: milliseconds to make a draft.")
    ] = 0.0
    rejected: Annotated[
        Path | None,
        typer.Option(help="With --drafts: a trace with a drafted token in place of each."),
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
        from moectl.commands.measure.simulate.table import show
        from moectl.shared.trace_source import TraceSource
        from runtime.control.serving import controller_kind
        from runtime.session.presets import find_presets

    clients = clients_of(replay.clients, replay.chunk, seed=replay.seed)
    stored = find_presets([preset, *names_in(replay.compare or "")], store)
    _check(source, replay)
    if replay.drafts and clients:
        raise BadUsage("--drafts are of one request at a time: leave out --clients")
    given = policies.given(avg_bits)
    for setting in _settings(preset, given, replay, stored):
        controller_kind(replay.serving, setting.build())
    with resumable():
        name, workload, settings = _opened(
            fill(TraceSource, source, store=store),
            source.machine,
            preset,
            given,
            replay,
            clients=clients,
            stored=stored,
        )
        if replay.drafts:
            _show_drafts(name, workload, settings, replay, as_json=json)
            return
        simulated = _simulated(name, workload, settings, replay, clients=clients)
    show(simulated, as_json=json)


def _check(source: TraceOptions, replay: ReplayOptions) -> None:
    """Raise BadUsage for a value that is not understood."""
    from artifacts.quantisation.replicas import check_base
    from runtime.policies.presets import Scope

    if replay.scope not in (None, *Scope):
        raise BadUsage(f"scope is layer or global, not {replay.scope!r}")
    check_base(replay.base)
    check_dense(replay.dense)
    if source.machine != HERE:
        timed_machine(source.machine)


def _reproduce(source: TraceOptions, replay: ReplayOptions, *, as_json: bool) -> None:
    with importing():
        command = of_clone("tools.reproductions.command", "--reproduce")
    others = (source.run, source.synthetic, source.num_experts, source.model, replay.compare)
    is_other = any(option is not None for option in others)
    command.show(
        command.reproduce(replay.reproduce, trace=source.trace, other_options=is_other),
        as_json=as_json,
    )


def _settings(
    preset: str,
    policies: dict[str, str],
    replay: ReplayOptions,
    stored: Mapping[str, "NamedPreset"],
) -> list["Setting"]:
    """Return the settings asked for, in their order; `stored` has the store's presets by name.
    Raises BadUsage for an unknown name.

    A name that presets and evictions share is an eviction beside other evictions. Only policies
    that split experts solve their split anew.
    """
    from runtime.policies import names, parse
    from runtime.policies.presets import presets

    if replay.compare is None:
        return [_setting("asked", stored.get(preset, preset), policies, replay)]
    compared = names_in(replay.compare)
    named = {name for name in compared if name in presets() or name in stored}
    evictions = {name for name in compared if name.partition(":")[0] in names("eviction")}
    asked = []
    for name in compared:
        if name in named and not (evictions - named and name in evictions):
            one = _setting(name, stored.get(name, name), policies, replay)
        else:
            parse("eviction", name)
            evicting = policies | {"eviction": name}
            one = _setting(name, stored.get(preset, preset), evicting, replay)
        asked.append(one if one.build().residency.cuts else replace(one, reconfigure_every=None))
    return asked


def _setting(
    label: str, preset: "str | NamedPreset", policies: dict[str, str], replay: ReplayOptions
) -> "Setting":
    from runtime.replay.settings import Setting

    return Setting(
        label,
        preset,
        policies,
        replay.scope,
        replay.budget,
        replay.reconfigure_every,
        replay.devices,
        replay.serving,
    )


def _opened(
    source: "TraceSource",
    machine: str,
    preset: str,
    policies: dict[str, str],
    replay: ReplayOptions,
    *,
    clients: "TraceClients | None",
    stored: Mapping[str, "NamedPreset"],
) -> "tuple[str, Workload, list[Setting]]":
    """Return the name of the source, its workload, and the settings asked for."""
    from moectl.shared.place_trace import place_trace
    from moectl.shared.trace_source import open_source
    from runtime.replay.workload import Workload
    from runtime.session.presets import find_presets

    settings = _settings(preset, policies, replay, stored)
    with_maps = any("maps" in setting.build().requires for setting in settings)
    opened = open_source(replace(source, with_maps=with_maps))
    if opened.model_id:
        stored = find_presets(stored, source.store, model_id=opened.model_id)
        settings = _settings(preset, policies, replay, stored)
    opened, chosen, costs = place_trace(
        opened, machine, source.store, base=replay.base, dense=replay.dense
    )
    workload = Workload(
        opened.trace,
        opened.model,
        chosen,
        artefacts=opened.artefacts,
        window=sizes.nbytes(replay.window) if replay.window else None,
        costs=costs,
        dense=replay.dense,
        clients=clients,
    )
    return opened.name, workload, settings


def _show_drafts(
    name: str,
    workload: "Workload",
    settings: list["Setting"],
    replay: ReplayOptions,
    *,
    as_json: bool,
) -> None:
    from artifacts.traces.parquet import read_parquet
    from moectl.commands.measure.simulate.drafts import (
        parse_acceptance,
        parse_lengths,
        show_drafts,
    )
    from runtime.replay.drafting import Drafts

    lengths = parse_lengths(replay.drafts)
    num_experts = workload.model.shape.num_experts
    rejected = replay.rejected and read_parquet(replay.rejected, num_experts=num_experts)
    chances = parse_acceptance(replay.acceptance)
    drafts = Drafts(chances, replay.draft_ms / 1e3, replay.seed, rejected)
    show_drafts(workload, settings, drafts, lengths, source=name, as_json=as_json)


def _simulated(
    name: str,
    workload: "Workload",
    settings: list["Setting"],
    replay: ReplayOptions,
    *,
    clients: "TraceClients | None",
) -> "Simulated":
    """Replay the trace once for each setting, for on-demand loading and for the oracles."""
    from moectl.commands.measure.simulate.table import PLAIN, Simulated, label
    from runtime.replay.settings import Outcome, Setting, oracles

    def identity(outcome: Outcome) -> tuple:
        """Return the key by which two rows are the same."""
        return label(outcome), outcome.policies, outcome.scope, outcome.num_slots, outcome.window

    asked = [workload.run(setting) for setting in settings]
    plain = replace(
        Setting(PLAIN, PLAIN, budget=replay.budget, devices=replay.devices, serving=replay.serving),
        scope=settings[0].scope or str(asked[0].scope),
    )
    beside = [workload.run(setting) for setting in (plain, *oracles(plain))]
    shown = [identity(outcome) for outcome in asked]
    beside = [outcome for outcome in beside if identity(outcome) not in shown]
    return Simulated(
        asked,
        beside,
        workload.trace,
        workload.model,
        workload.machine,
        name,
        workload.assumed,
        replay.base,
        replay.dense,
        clients,
        workload.served,
    )
