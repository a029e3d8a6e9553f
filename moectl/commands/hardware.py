"""`moectl profile --hardware`: what this machine takes for a model, into the store."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from artifacts.errors import BadUsage
from artifacts.hardware.profile import COMMAND, HardwareProfile, Spread, to_rows
from artifacts.quantisation.replicas import Replicas
from artifacts.shape import FULL_BITS
from artifacts.store.runs import ModelInfo, RunInfo, utc_now
from artifacts.store.store import add_run
from moectl.bundled import demo_model
from moectl.shared.opening import check_store, model_info, open_quietly, stored_artefacts
from moectl.shared.progress import progress_bar
from moectl.show.render import Sheet, human_bytes, show_json, show_sheet
from profilers.hardware.load_times import THOROUGH, Effort
from profilers.hardware.profile import measure
from profilers.hardware.this_machine import Here
from runtime.model.locate import locate
from runtime.model.open import MoeModel
from runtime.session.link_choice import link_name

_MOST_PINNED = 0.8  # of the RAM that can be had


@dataclass(frozen=True, slots=True)
class HardwareMeasurement:
    """A profile and the run of the store that holds it; None where it was not kept."""

    model: str
    profile: HardwareProfile
    run: int | None = None


def refuse_routing(*, trace: bool, shard: str, is_spread: bool) -> None:
    """Raise BadUsage for what goes with text."""
    if trace or shard != "1/1" or is_spread:
        raise BadUsage(
            "--hardware measures the machine and reads no text: leave out --trace, --shard, --jobs and --executor"
        )


def profile_hardware(name: str | None, *, link: str, device: str, threads: int, store: Path) -> HardwareMeasurement:
    """Measure this machine with the model `name` (None: the bundled one) and write the run, all rows or none.

    Replicas of the model that the store holds are measured near memory. Raises BadUsage for a link or device that is
    not there, BadInput for a model that cannot be opened.
    """
    torch.set_num_threads(threads)
    started_at, begin_s = utc_now(), time.perf_counter()
    check_store(store)
    name = name or str(demo_model())
    opened = open_quietly(name, device=device)
    profile = measured(name, opened, link=link, replicas=stored_artefacts(store, opened).replicas, effort=THOROUGH)
    info = model_info(name, opened)
    return HardwareMeasurement(name, profile, _write(store, info, profile, started_at, time.perf_counter() - begin_s))


def measured(name: str, opened: MoeModel, *, link: str, replicas: Replicas | None, effort: Effort) -> HardwareProfile:
    link_name(opened, link)  # what is not understood is told before anything is measured
    with progress_bar("measuring", unit="parts") as advance:
        return measure(
            opened,
            locate(name),
            link=affordable(opened, link),
            replicas=replicas,
            effort=effort,
            progress=advance,
        )


def affordable(opened: MoeModel, link: str) -> str:
    """`auto`, but where a GPU's link would page-lock more than there is: then the disk."""
    device = opened.model.device
    if link != "auto" or device.type != "cuda":
        return link
    fits = opened.shape.nbytes <= _MOST_PINNED * Here.look(device).available_nbytes
    return link if fits else "disk"


def _write(path: Path, model: ModelInfo, profile: HardwareProfile, started_at: object, seconds: float) -> int:
    info = RunInfo(
        command=COMMAND,
        model_id=model.model_id,
        started_at=started_at,
        seconds=seconds,
        parameters=dict(profile.conditions),
    )
    return add_run(path, info, {"hardware": to_rows(profile)}, model=model)


def show(found: HardwareMeasurement, *, as_json: bool) -> None:
    """Print three tables, or one JSON object."""
    if as_json:
        show_json({"run": found.run, "model": found.model, **record(found.profile)})
        return
    for sheet in sheets(found):
        show_sheet(sheet)


def record(profile: HardwareProfile) -> dict[str, object]:
    return asdict(profile) | {"conditions": dict(profile.conditions)}


def sheets(found: HardwareMeasurement) -> list[Sheet]:
    """Computing, loading, near memory; microseconds, and the interquartile range in brackets."""
    profile = found.profile
    compute = [
        (one.tokens, *(_us(part) for part in (one.attention, one.moe, one.head, one.expert))) for one in profile.compute
    ]
    loads = [
        (one.link, _us(one.seconds), one.gbps, *(part and _us(part) for part in (one.latency, one.miss, one.host)))
        for one in profile.loads
    ]
    near = [(f"{one.bits}", one.tokens, _us(one.seconds)) for one in profile.near]
    return [
        Sheet(
            "Computing, microseconds (interquartile range)",
            ("tokens", "a layer but its experts", "a layer's experts", "head", "one expert"),
            compute,
        ),
        Sheet(
            "Bringing one expert, microseconds (interquartile range)",
            ("link", "over the link", "GB/s", "latency of it", "a miss adds to a step", "the engine's work of it"),
            loads,
        ),
        Sheet("One expert near memory, microseconds", ("bits", "tokens", "on the CPU"), near, conditions(found)),
    ]


def conditions(found: HardwareMeasurement) -> str:
    known = found.profile.conditions
    load = "unknown" if known["load"] is None else f"{known['load']:.1f}"
    kept = f"run {found.run}" if found.run is not None else "not kept"
    return (
        f"{kept}: {known['device_name']}, {known['cores']} cores of {known['processor']}, torch threads "
        f"{known['threads']}, {human_bytes(known['memory_nbytes'])} of RAM, load before {load}; {known['dtype']}, "
        f"experts of {human_bytes(known['expert_bytes'])} ({FULL_BITS} bits: the checkpoint's own); medians of "
        f"{known['turns']}; one token follows on {known['context']} or more"
    )


def _us(spread: Spread) -> str:
    return f"{spread.median * 1e6:,.0f} ({spread.iqr * 1e6:,.0f})"
