"""`moectl doctor`: say what this machine has for a model and what stands in the way; what takes
longer on request.

Without `--measure` neither torch nor transformers is imported, and no weights are opened.
"""

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from artifacts.errors import BadUsage
from artifacts.hardware.profile import COMMAND
from moectl.bundled import as_named, demo_model, is_bundled
from moectl.cli.options import EngineOptions, Json, Model, StorePath
from moectl.shared import installed
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.terminal.resuming import resumable
from runtime.control import sizes

if TYPE_CHECKING:
    from moectl.commands.build.profile.hardware import HardwareMeasurement
    from moectl.commands.start.doctor.findings import Diagnosis, DoctorFinding
    from moectl.shared.glance import CheckpointGlance
    from moectl.shared.terminal.progress import Phases
    from moectl.show.render import Sheet
    from profilers.compare.check_prediction import Prediction

# shares of the time of the phases
_LOOKING = (1, 1, 1)
_MEASURING = (2, 8, 1, 4)
_LINKS = ("auto", "disk", "direct", "cuda")


def doctor(
    *,
    model: Model = None,
    engine: EngineOptions,
    store: StorePath = DEFAULT_STORE,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure too, a quarter of a minute or more, and check a prediction."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Say what this machine can run, and what is in the way.

    --measure says what it takes, too.
    """
    installed.check()  # before the imports of packages that may be missing
    from moectl.shared.terminal.progress import Phases

    named = as_named(model)
    path = named or str(demo_model())
    with (
        resumable(),
        Phases(
            *(_MEASURING if measure else _LOOKING), is_quiet=json, at_once=not measure
        ) as phases,
    ):
        if measure:
            phases.begin("opening the model")
            from moectl.commands.start.doctor.measured import diagnose

            diagnosis = diagnose(path, engine, phases, named=named, store=store)
        else:
            diagnosis = _looked(path, engine, phases, named=named, store=store)
    _show(diagnosis, as_json=json)


def _looked(
    path: str, engine: EngineOptions, phases: "Phases", *, named: str | None, store: Path
) -> "Diagnosis":
    """Look at what is there, without measuring anything."""
    from moectl.commands.start.doctor import findings
    from moectl.shared.glance import glance
    from profilers.hardware.this_machine import LocalMachine

    _check_options(engine.link, engine.device)
    seen = glance(path)
    model_ids, profile = _held(store, path)
    if seen.shape is not None:
        sizes.num_slots(engine.budget, seen.shape, per_layer=True)
    phases.begin("looking at what is installed")
    all_findings = findings.of_installation()
    phases.begin("looking at the machine")
    here = LocalMachine.glance(engine.device, engine.threads)
    all_findings += findings.of_machine(here, seen.shape)
    phases.begin("looking at the model, the store and its disk")
    all_findings += _of_checkpoint(seen)
    if seen.shape is not None:
        all_findings.append(findings.of_room(store, seen.shape, weight_nbytes=seen.weight_nbytes))
    all_findings += findings.of_store(store, model_ids, model=named)
    if profile is not None:
        all_findings += findings.of_disk(profile.profile) + findings.of_profile(
            profile.profile, here
        )
    return findings.Diagnosis(path, all_findings, profile, is_stored=profile is not None)


def _show(diagnosis: "Diagnosis", *, as_json: bool) -> None:
    """Print the profile if there is one, the findings, and the prediction if one was checked; or
    one JSON object."""
    from moectl.commands.build.profile.hardware import record, sheets
    from moectl.show.render import show_json, show_sheet

    measured = diagnosis.measured
    if as_json:
        source = measured and {"run": measured.run, "is_stored": diagnosis.is_stored} | record(
            measured.profile
        )
        show_json(
            {
                "model": diagnosis.model,
                "hardware": source,
                "findings": [asdict(finding) for finding in diagnosis.findings],
                "prediction": diagnosis.prediction and asdict(diagnosis.prediction),
            }
        )
        return
    for sheet in (*(sheets(measured) if measured else ()), *_findings(diagnosis)):
        show_sheet(sheet)
    if diagnosis.prediction:
        show_sheet(_prediction(diagnosis.prediction))


def _check_options(link: str, device: str) -> None:
    """Raise BadUsage for a link or a device that is not understood; whether they are here shows
    when they are used."""
    if link not in _LINKS:
        sizes.rate(link)
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise BadUsage(f"device {device!r} is not known: use auto, cpu, cuda or cuda:1")


def _of_checkpoint(seen: "CheckpointGlance") -> list["DoctorFinding"]:
    from moectl.commands.start.doctor import findings

    if seen.shape is None:
        return [
            findings.DoctorFinding(
                "experts", f"their size is not known before the model is opened: {seen.unknown}"
            )
        ]
    return [
        findings.of_experts(seen.expert_format, seen.dtype),
        findings.of_dense(seen.dense_nbytes),
    ]


def _held(path: Path, model: str) -> tuple[list[str], "HardwareMeasurement | None"]:
    """The ids of models that a store has by the same path or name, and the newest hardware profile
    of them."""
    from artifacts.store.hardware_profiles import stored_profile
    from artifacts.store.store import Store
    from moectl.commands.build.profile.hardware import HardwareMeasurement

    if not path.exists():
        return [], None
    with Store.open(path, read_only=True) as store:
        model_ids = [each.model_id for each in store.models() if _is_same(each.name, model)]
        for model_id in reversed(model_ids):
            if profile := stored_profile(store, model_id):
                return model_ids, HardwareMeasurement(
                    model, profile, store.latest_run(COMMAND, model_id).run_id
                )
    return model_ids, None


def _is_same(held: str, model: str) -> bool:
    if is_bundled(held) or is_bundled(model):
        return is_bundled(held) and is_bundled(model)
    return (
        held == model or Path(held).exists() and Path(model).exists() and Path(held).samefile(model)
    )


def _findings(diagnosis: "Diagnosis") -> list["Sheet"]:
    """Return two tables: findings that are in order, and findings that need a remedy."""
    from moectl.show.render import Sheet

    fine = [
        (finding.topic, finding.says) for finding in diagnosis.findings if finding.remedy is None
    ]
    wrong = [
        (finding.topic, finding.says, finding.remedy)
        for finding in diagnosis.findings
        if finding.remedy
    ]
    note = (
        ""
        if diagnosis.prediction
        else "nothing was measured: --measure does, and checks a prediction on a short run"
    )
    in_order = Sheet("In order", ("about", "what there is"), fine)
    columns = ("about", "what there is", "what mends it")
    nothing = [("all", "nothing was found", None)]
    return [in_order, Sheet("What stands in the way", columns, wrong or nothing, note)]


def _prediction(made: "Prediction") -> "Sheet":
    from moectl.show.render import Sheet

    rows = [
        ("predicted", f"{made.predicted_ms:.2f}", f"{made.predicted_stall_ms:.2f}"),
        ("measured", f"{made.measured_ms:.2f}", f"{made.measured_stall_ms:.2f}"),
        ("predicted / measured", f"{made.ratio:.3f}", None),
        ("at the pace of now", f"{made.ratio_at_pace:.3f}", None),
    ]
    note = (
        f"{made.preset} with {made.budget} of the experts over {made.link}: {made.tokens} tokens "
        f"decoded, hit rate {made.hit_rate:.3f}; predicted from the run's own trace by the "
        "simulator with the costs above. Pace: between the runs a layer without its experts took "
        f"{made.pace:.2f} times as long as when it was profiled"
    )
    return Sheet("The prediction", ("", "ms per token", "of them waiting for the link"), rows, note)
