"""`moectl profile --hardware`: measure what a model costs on this machine, into the store, and show
it; what only shows imports no torch."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.hardware.profile import COMMAND, HardwareProfile, Spread, to_rows
from artifacts.shape import FULL_BITS
from artifacts.store.runs import RunInfo, utc_now
from moectl.bundled import demo_model
from moectl.cli.options import EngineOptions
from moectl.shared.importing import importing
from moectl.shared.terminal.resuming import resumable
from moectl.show.render import Sheet, human_bytes, show_json, show_sheet

if TYPE_CHECKING:
    from artifacts.quantisation.replicas import Replicas
    from profilers.hardware.load_times import TimingEffort
    from runtime.model.open import MoeModel

_MOST_PINNED = 0.8  # of the available RAM


@dataclass(frozen=True, slots=True)
class HardwareMeasurement:
    """A hardware profile, and the run of the store that holds it, None when it was not stored."""

    model: str
    profile: HardwareProfile
    run: int | None = None


@resumable()
def profile_hardware(
    name: str | None, engine: EngineOptions, *, store: Path
) -> HardwareMeasurement:
    """Measure this machine with the model `name` (None: the bundled one) and write the run, all
    rows or none.

    The replicas that the store holds of the model are measured near memory. Raises BadUsage for a
    link or device that the machine lacks, BadInput for a model that cannot be opened.
    """
    with importing():
        import torch

        from artifacts.store.store import add_run
        from moectl.shared.opening import model_info, open_quietly
        from moectl.shared.stores import check_store, stored_artefacts
        from profilers.hardware.load_times import THOROUGH

    torch.set_num_threads(engine.threads)
    started_at = utc_now()
    begin_s = time.perf_counter()
    check_store(store)
    name = name or str(demo_model())
    opened = open_quietly(name, device=engine.device)
    replicas = stored_artefacts(store, opened).replicas
    profile = measured(name, opened, link=engine.link, replicas=replicas, effort=THOROUGH)
    model = model_info(name, opened)
    info = RunInfo(
        command=COMMAND,
        model_id=model.model_id,
        started_at=started_at,
        seconds=time.perf_counter() - begin_s,
        parameters=dict(profile.conditions),
    )
    run = add_run(store, info, {"hardware": to_rows(profile)}, model=model)
    return HardwareMeasurement(name, profile, run)


def measured(
    name: str, opened: "MoeModel", *, link: str, replicas: "Replicas | None", effort: "TimingEffort"
) -> HardwareProfile:
    """Measure this machine with an opened model over a link."""
    from moectl.shared.terminal.progress import progress_bar
    from profilers.hardware.profile import measure
    from runtime.model.files.locate import locate
    from runtime.session.link_choice import link_name

    link_name(opened, link)  # an unknown link is reported before anything is measured
    with progress_bar("measuring", unit="parts") as advance:
        return measure(
            opened,
            locate(name),
            link=affordable(opened, link),
            replicas=replicas,
            effort=effort,
            progress=advance,
        )


def affordable(opened: "MoeModel", link: str) -> str:
    """Return the link, but `disk` for `auto` where a GPU's link would page-lock more memory than is
    available."""
    from profilers.hardware.this_machine import LocalMachine
    from runtime.links.choose import default_kind

    device = opened.model.device
    if link != "auto" or default_kind(device) == "disk":
        return link
    fits = opened.shape.nbytes <= _MOST_PINNED * LocalMachine.look(device).available_nbytes
    return link if fits else "disk"


def show(measurement: HardwareMeasurement, *, as_json: bool) -> None:
    """Print three tables, or one JSON object."""
    if as_json:
        show_json(
            {"run": measurement.run, "model": measurement.model, **record(measurement.profile)}
        )
        return
    for sheet in sheets(measurement):
        show_sheet(sheet)


def record(profile: HardwareProfile) -> dict[str, object]:
    return asdict(profile) | {"conditions": dict(profile.conditions)}


def sheets(measurement: HardwareMeasurement) -> list[Sheet]:
    """Return tables of computing, loading and near memory, in microseconds with the interquartile
    range in brackets."""
    profile = measurement.profile
    compute = [
        (step.tokens, *(_us(part) for part in (step.attention, step.moe, step.head, step.expert)))
        for step in profile.compute
    ]
    loads = [
        (
            load.link,
            _us(load.seconds),
            load.gbps,
            *(part and _us(part) for part in (load.latency, load.miss, load.host)),
        )
        for load in profile.loads
    ]
    near = [
        ("checkpoint" if cost.bits == FULL_BITS else f"{cost.bits}", cost.tokens, _us(cost.seconds))
        for cost in profile.near
    ]
    return [
        Sheet(
            "Computing, microseconds (interquartile range)",
            ("tokens", "a layer but its experts", "a layer's experts", "head", "one expert"),
            compute,
        ),
        Sheet(
            "Bringing one expert, microseconds (interquartile range)",
            (
                "link",
                "over the link",
                "GB/s",
                "latency of it",
                "a miss adds to a step",
                "the engine's work of it",
            ),
            loads,
        ),
        Sheet(
            "One expert near memory, microseconds",
            ("bits", "tokens", "on the CPU"),
            near,
            conditions(measurement),
        ),
    ]


def conditions(measurement: HardwareMeasurement) -> str:
    machine = measurement.profile.conditions
    load = "unknown" if machine["load"] is None else f"{machine['load']:.1f}"
    expert = human_bytes(machine["expert_bytes"])
    memory = human_bytes(machine["memory_nbytes"])
    kept = f"run {measurement.run}" if measurement.run is not None else "not kept"
    return (
        f"{kept}: {machine['device_name']}, {machine['cores']} cores of {machine['processor']}, "
        f"torch threads {machine['threads']}, {memory} of RAM, load before {load}; "
        f"{machine['dtype']}, experts of {expert} in "
        f"{machine.get('expert_format', machine['dtype'])}; medians of {machine['turns']}; one "
        f"token follows on {machine['context']} or more"
    )


def _us(spread: Spread) -> str:
    return f"{spread.median * 1e6:,.0f} ({spread.iqr * 1e6:,.0f})"
