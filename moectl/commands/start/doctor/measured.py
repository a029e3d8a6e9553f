"""Measurements of `moectl doctor --measure`: costs of the model on the machine, and a prediction
checked on a short run."""

from pathlib import Path

import numpy as np
import torch

from artifacts.errors import OutOfResources
from artifacts.hardware.profile import COMMAND, HardwareProfile
from artifacts.store.hardware_profiles import stored_profile
from artifacts.store.store import Store
from moectl.cli.options import EngineOptions
from moectl.commands.build.profile import hardware
from moectl.commands.build.profile.hardware import HardwareMeasurement
from moectl.commands.start.doctor import findings
from moectl.commands.start.doctor.findings import Diagnosis
from moectl.shared.opening import open_quietly
from moectl.shared.stores import stored_artefacts
from moectl.shared.terminal.progress import Phases
from moectl.show.render import human_bytes
from profilers.compare.bench import text_of
from profilers.compare.check_prediction import check
from profilers.hardware.load_times import QUICK
from profilers.hardware.this_machine import LocalMachine
from profilers.text.batches import check_sequences
from profilers.text.corpus import documents
from runtime.control import sizes
from runtime.model.open import MoeModel
from runtime.session.link_choice import link_name

_NUM_SEQUENCES = 4
_PREFILL = 16
_DECODE = 24
_MOST = 0.8  # of the available memory
_TEXT = "builtin:held-out"


def diagnose(
    path: str, engine: EngineOptions, phases: Phases, *, named: str | None, store: Path
) -> Diagnosis:
    """Examine this machine with a model; nothing is written.

    A short profile is measured when the store has none of this machine and link. Raises BadUsage,
    BadInput for a model or store that cannot be opened, OutOfResources when the budget does not
    fit.
    """
    torch.set_num_threads(engine.threads)
    opened = open_quietly(path, device=engine.device)
    link_name(opened, engine.link)  # an unknown link is reported before anything is measured
    here = LocalMachine.look(opened.model.device)
    _check_room(opened, engine.budget, here)
    link = hardware.affordable(opened, engine.link)
    stored = _stored(path, opened, store)
    is_stored = stored is not None and _fits(stored.profile, here, link_name(opened, link))
    phases.begin("measuring the machine, the model's parts on it")
    measured = stored if is_stored else _measured(path, opened, link, store)
    phases.begin("looking at the installation, the machine and the store")
    all_findings = findings.of_installation()
    all_findings += findings.of_machine(here, opened.shape) + findings.of_disk(measured.profile)
    all_findings.append(
        findings.of_experts(opened.expert_format, str(opened.dtype).removeprefix("torch."))
    )
    all_findings.append(
        findings.of_room(store, opened.stored_shape, weight_nbytes=opened.weight_nbytes)
    )
    all_findings += findings.of_store(store, [opened.fingerprint[:16]], model=named)
    if stored is not None:
        all_findings += findings.of_profile(stored.profile, here)
    phases.begin("checking a prediction on a short run")
    sequences = sequences_of(opened)
    prediction = check(
        opened, measured.profile, sequences, prefill=_PREFILL, budget=engine.budget, link=link
    )
    return Diagnosis(path, all_findings, measured, is_stored, prediction)


def _stored(name: str, opened: MoeModel, path: Path) -> HardwareMeasurement | None:
    if not path.exists():
        return None
    with Store.open(path, read_only=True) as store:
        model_id = opened.fingerprint[:16]
        profile = stored_profile(store, model_id)
        run = store.latest_run(COMMAND, model_id)
    return None if profile is None else HardwareMeasurement(name, profile, run.run_id)


def _fits(profile: HardwareProfile, here: LocalMachine, link: str) -> bool:
    """Return whether the profile was measured on this machine and over this link."""
    device = "cuda" if here.gpu else "cpu"
    return not findings.changed(profile, here) and (profile.conditions["link"], profile.device) == (
        link,
        device,
    )


def _measured(name: str, opened: MoeModel, link: str, store: Path) -> HardwareMeasurement:
    replicas = stored_artefacts(store, opened).replicas
    return HardwareMeasurement(
        name, hardware.measured(name, opened, link=link, replicas=replicas, effort=QUICK)
    )


def _check_room(opened: MoeModel, budget: str, here: LocalMachine) -> None:
    """Raise OutOfResources before the system would end the process for lack of memory."""
    wanted = sizes.num_slots(budget, opened.shape, per_layer=True) * opened.store.layout.nbytes
    room = here.gpu_nbytes or here.available_nbytes
    if wanted > _MOST * room:
        raise OutOfResources(
            f"a budget of {budget} takes {human_bytes(wanted)} and {human_bytes(room)} can be had: "
            "give a smaller --budget"
        )


def sequences_of(opened: MoeModel) -> list[np.ndarray]:
    """Return the beginnings of held-out docstrings; random tokens for a model without a
    tokenizer."""
    length = _PREFILL + _DECODE
    if opened.tokenizer is None:
        return list(
            np.random.default_rng(0).integers(0, opened.config.vocab_size, (_NUM_SEQUENCES, length))
        )
    num_tokens = _NUM_SEQUENCES * length
    text = text_of(documents(_TEXT), opened.tokenizer, length=length, num_tokens=num_tokens)
    sequences = list(text.sequences)
    check_sequences(opened.model, sequences)
    return sequences
