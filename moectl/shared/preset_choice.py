"""Choice of a preset when the user names none: the best that loses nothing, by facts known before
the first token."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.errors import Problem
from runtime.control import sizes
from runtime.policies.presets import Preset, preset
from runtime.session.settings import DEVICE, Settings

if TYPE_CHECKING:  # which imports torch
    from runtime.model.open import MoeModel

AUTO = Preset(
    "auto", summary="the best that loses nothing, chosen when the model is open", paper="moectl"
)
"""Stands in settings for the preset that `with_choice` puts there."""


@dataclass(frozen=True, slots=True)
class Known:
    """Facts about a run that decide its preset.

    `names_policies`: the user names policies. `fits`: every expert fits the budget.
    `decides_on_device`: the GPU itself evicts, which it does as one preset. `tuned`: the lossless
    preset that `moectl tune` found for this model, machine and budget. `is_emulated`: the link and
    near tier of another machine are emulated. `has_predictors`: the store has predictors for this
    model. `is_in_memory`: the memory of this machine holds the model's files, so that a load from
    disk is a copy. `note` says what could not be looked at.
    """

    names_policies: bool = False
    fits: bool = False
    decides_on_device: bool = False
    tuned: Preset | None = None
    is_emulated: bool = False
    has_predictors: bool = False
    is_in_memory: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class PresetChoice:
    """A preset, and why it was chosen, in a few words."""

    preset: str | Preset
    why: str


def choose(known: Known) -> PresetChoice:
    """Return the best lossless preset for the known facts. The origin of the rules is in
    docs/running.md."""
    if known.names_policies:
        return PresetChoice("on-demand", "the policies named replace its own")
    if known.fits:
        return PresetChoice("full", "every expert fits the budget")
    if known.decides_on_device:
        return PresetChoice("on-demand", "the GPU itself evicts, as its lru does")
    if known.tuned:
        return PresetChoice(known.tuned, "`moectl tune` found it")
    if known.is_emulated:
        return PresetChoice("near", "the emulated machine has a near tier")
    if known.is_in_memory:
        return PresetChoice("on-demand", "the fastest exact one while memory holds the files")
    if known.has_predictors:
        return PresetChoice("foresight", "the store has predictors")
    return PresetChoice("horizon", "loads are slow: fewest of them")


def with_choice(opened: "MoeModel", settings: Settings, store: Path | None) -> tuple[Settings, str]:
    """Return the settings with the chosen preset in the place of AUTO, and the reason for the
    choice. Settings with a preset of the user's are returned as they are, with an empty text."""
    if settings.preset is not AUTO:
        return settings, ""
    known = known_of(opened, settings, store)
    choice = choose(known)
    chosen = replace(preset(choice.preset), note=known.note) if known.note else choice.preset
    return replace(settings, preset=chosen), choice.why


def known_of(opened: "MoeModel", settings: Settings, store: Path | None) -> Known:
    """Return what model, machine and store say."""
    budget_nbytes = sizes.budget_nbytes(settings.budget, opened.shape)
    looks = store and not settings.policies
    tuned, has_predictors, note = _stored(opened, settings, store) if looks else (None, False, "")
    return Known(
        names_policies=bool(settings.policies),
        fits=budget_nbytes >= opened.shape.nbytes,
        decides_on_device=settings.decide == DEVICE,
        tuned=tuned,
        is_emulated=settings.scaled_to is not None,
        has_predictors=has_predictors,
        is_in_memory=_reads_files(opened, settings)
        and opened.shape.nbytes + budget_nbytes <= _available_nbytes(),
        note=note,
    )


def _stored(opened: "MoeModel", settings: Settings, store: Path) -> tuple[Preset | None, bool, str]:
    """Return the tuned preset, and whether there are predictors.

    Return only a note where the store cannot be read now, for example because another process
    writes it: a run that needs no store is not stopped by one.
    """
    # late: the store's imports take a tenth of a second
    from artifacts.routing.predictors import COMMAND
    from artifacts.store.presets import stored_presets
    from artifacts.store.store import Store
    from runtime.session.presets import as_preset

    model_id = opened.fingerprint[:16]
    machine = settings.scaled_to or (
        "here" if settings.link == "auto" else f"here, {settings.link}"
    )
    wanted = (model_id, machine, settings.budget, 0)
    try:
        with Store.open(store, read_only=True, patience_s=0) as held:
            tuned = (
                as_preset(kept)
                for kept in stored_presets(held)
                if (kept.model_id, kept.preset.machine, kept.preset.budget, kept.preset.max_loss)
                == wanted
            )
            return next(tuned, None), held.latest_run(COMMAND, model_id) is not None, ""
    except Problem as problem:
        return None, False, f"no preset that moectl tune may have stored was looked for: {problem}"


def _reads_files(opened: "MoeModel", settings: Settings) -> bool:
    """Return whether experts come from the model's files by way of the page cache."""
    from runtime.links.choose import default_kind

    link = default_kind(opened.model.device) if settings.link == "auto" else settings.link
    return settings.scaled_to is None and link == "disk"


def _available_nbytes() -> int:
    from profilers.hardware.this_machine import LocalMachine

    return LocalMachine.glance("cpu", 1).available_nbytes
