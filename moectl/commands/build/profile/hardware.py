"""`moectl profile --hardware`: measure what a model costs on this machine, into the store."""

import time
from pathlib import Path

import torch

from artifacts.errors import BadUsage
from artifacts.hardware.profile import COMMAND, HardwareProfile, to_rows
from artifacts.quantisation.replicas import Replicas
from artifacts.store.runs import ModelInfo, RunInfo, utc_now
from artifacts.store.store import add_run
from moectl.bundled import demo_model
from moectl.commands.build.profile.hardware_sheets import HardwareMeasurement, record, sheets
from moectl.shared.opening import model_info, open_quietly
from moectl.shared.progress import progress_bar
from moectl.shared.resuming import resumable
from moectl.shared.stores import check_store, stored_artefacts
from moectl.show.render import show_json, show_sheet
from profilers.hardware.load_times import THOROUGH, TimingEffort
from profilers.hardware.profile import measure
from profilers.hardware.this_machine import LocalMachine
from runtime.model.locate import locate
from runtime.model.open import MoeModel
from runtime.session.link_choice import link_name

_MOST_PINNED = 0.8  # of the available RAM


def refuse_routing(*, trace: bool, shard: str, is_spread: bool) -> None:
    """Raise BadUsage for options of a routing profile."""
    if trace or shard != "1/1" or is_spread:
        raise BadUsage(
            "--hardware measures the machine and reads no text: leave out --trace, --shard, "
            "--jobs and --executor"
        )


@resumable()
def profile_hardware(
    name: str | None, *, link: str, device: str, threads: int, store: Path
) -> HardwareMeasurement:
    """Measure this machine with the model `name` (None: the bundled one) and write the run, all
    rows or none.

    The replicas that the store holds of the model are measured near memory. Raises BadUsage for a
    link or device that the machine lacks, BadInput for a model that cannot be opened.
    """
    torch.set_num_threads(threads)
    started_at = utc_now()
    begin_s = time.perf_counter()
    check_store(store)
    name = name or str(demo_model())
    opened = open_quietly(name, device=device)
    profile = measured(
        name, opened, link=link, replicas=stored_artefacts(store, opened).replicas, effort=THOROUGH
    )
    info = model_info(name, opened)
    return HardwareMeasurement(
        name, profile, _write(store, info, profile, started_at, time.perf_counter() - begin_s)
    )


def measured(
    name: str, opened: MoeModel, *, link: str, replicas: Replicas | None, effort: TimingEffort
) -> HardwareProfile:
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


def affordable(opened: MoeModel, link: str) -> str:
    """Return the link, but `disk` for `auto` where a GPU's link would page-lock more memory than is
    available."""
    device = opened.model.device
    if link != "auto" or device.type != "cuda":
        return link
    fits = opened.shape.nbytes <= _MOST_PINNED * LocalMachine.look(device).available_nbytes
    return link if fits else "disk"


def _write(
    path: Path, model: ModelInfo, profile: HardwareProfile, started_at: object, seconds: float
) -> int:
    info = RunInfo(
        command=COMMAND,
        model_id=model.model_id,
        started_at=started_at,
        seconds=seconds,
        parameters=dict(profile.conditions),
    )
    return add_run(path, info, {"hardware": to_rows(profile)}, model=model)


def show(measurement: HardwareMeasurement, *, as_json: bool) -> None:
    """Print three tables, or one JSON object."""
    if as_json:
        show_json(
            {"run": measurement.run, "model": measurement.model, **record(measurement.profile)}
        )
        return
    for sheet in sheets(measurement):
        show_sheet(sheet)
