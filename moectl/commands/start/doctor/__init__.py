"""`moectl doctor`: say what this machine has for a model and what stands in the way; what takes
longer on request.

Without `--measure` neither torch nor transformers is imported, and no weights are opened.
"""

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.errors import BadUsage
from artifacts.hardware.profile import COMMAND
from artifacts.store.hardware_profiles import stored_profile
from artifacts.store.store import Store
from moectl.bundled import as_named, demo_model, is_bundled
from moectl.commands.build.profile.hardware import HardwareMeasurement, record, sheets
from moectl.commands.start.doctor import findings as findings
from moectl.commands.start.doctor.findings import Diagnosis, DoctorRequest
from moectl.shared.glance import CheckpointGlance, glance
from moectl.shared.progress import Phases
from moectl.shared.resuming import resumable
from moectl.show.render import Sheet, show_json, show_sheet
from profilers.hardware.this_machine import LocalMachine
from runtime.control import sizes

if TYPE_CHECKING:
    from profilers.compare.check_prediction import Prediction

# shares of the time of the phases
_LOOKING = (1, 1, 1)
_MEASURING = (2, 8, 1, 4)
_LINKS = ("auto", "disk", "direct", "cuda")


@resumable()
def doctor(
    name: str | None,
    *,
    budget: str,
    link: str,
    device: str,
    threads: int,
    store: Path,
    measure: bool,
    is_quiet: bool = True,
) -> Diagnosis:
    """Examine this machine for the model `name` (None: the bundled one); nothing is written.

    Phases are told on stderr unless `is_quiet`. Raises BadUsage for an option that is not
    understood, and BadInput for a model or store that cannot be read or is refused. With `measure`
    it also raises whatever measuring raises.
    """
    named = as_named(name)
    request = DoctorRequest(named or str(demo_model()), named, budget, link, device, threads, store)
    with Phases(
        *(_MEASURING if measure else _LOOKING), is_quiet=is_quiet, at_once=not measure
    ) as phases:
        if not measure:
            return _looked(request, phases)
        phases.begin("opening the model")
        from moectl.commands.start.doctor.measured import diagnose

        return diagnose(request, phases)


def _looked(request: DoctorRequest, phases: Phases) -> Diagnosis:
    """Look at what is there, without measuring anything."""
    _check_options(request.link, request.device)
    seen = glance(request.path)
    model_ids, profile = _held(request.store, request.path)
    if seen.shape is not None:
        sizes.num_slots(request.budget, seen.shape, per_layer=True)
    phases.begin("looking at what is installed")
    all_findings = findings.of_installation()
    phases.begin("looking at the machine")
    here = LocalMachine.glance(request.device, request.threads)
    all_findings += findings.of_machine(here, seen.shape)
    phases.begin("looking at the model, the store and its disk")
    all_findings += _of_checkpoint(seen)
    if seen.shape is not None:
        all_findings.append(
            findings.of_room(request.store, seen.shape, weight_nbytes=seen.weight_nbytes)
        )
    all_findings += findings.of_store(
        request.store, model_ids, model=request.named, shown=request.store_option
    )
    if profile is not None:
        all_findings += findings.of_disk(profile.profile) + findings.of_profile(
            profile.profile, here
        )
    return Diagnosis(request.path, all_findings, profile, is_stored=profile is not None)


def show(diagnosis: Diagnosis, *, as_json: bool) -> None:
    """Print the profile if there is one, the findings, and the prediction if one was checked; or
    one JSON object."""
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


def _of_checkpoint(seen: CheckpointGlance) -> list[findings.DoctorFinding]:
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


def _held(path: Path, model: str) -> tuple[list[str], HardwareMeasurement | None]:
    """The ids of models that a store has by the same path or name, and the newest hardware profile
    of them."""
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


def _findings(diagnosis: Diagnosis) -> list[Sheet]:
    """Return two tables: findings that are in order, and findings that need a remedy."""
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


def _prediction(made: "Prediction") -> Sheet:
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
