"""Choice of a preset when the user names none: the fastest that loses nothing, by facts known
before the first token and by a short replay."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.errors import Problem
from runtime.control import sizes
from runtime.policies.presets import Preset, preset
from runtime.session import settings as ways
from runtime.session.settings import Settings

if TYPE_CHECKING:  # which imports torch
    from runtime.model.open import MoeModel

AUTO = Preset(
    "auto", summary="the best that loses nothing, chosen when the model is open", paper="moectl"
)
"""Stands in settings for the preset that `with_choice` puts there."""


@dataclass(frozen=True, slots=True)
class Known:
    """Facts about a run that decide its preset before anything is measured.

    `names_policies`: the user names policies. `fits`: every expert fits the budget. `tuned`: the
    lossless preset that `moectl tune` found for this model, machine and budget. `has_predictors`:
    the store has predictors for this model. `note` says what could not be looked at.
    """

    names_policies: bool = False
    fits: bool = False
    tuned: Preset | None = None
    has_predictors: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class PresetChoice:
    """A preset, and why it was chosen, in a few words."""

    preset: str | Preset
    why: str


def choose(known: Known) -> PresetChoice | None:
    """Return the best lossless preset by the known facts; None where they leave it to a replay."""
    if known.names_policies:
        return PresetChoice("on-demand", "the policies named replace its own")
    if known.fits:
        return PresetChoice("full", "every expert fits the budget")
    if known.tuned:
        return PresetChoice(known.tuned, "`moectl tune` found it")
    return None


def with_choice(opened: "MoeModel", settings: Settings, store: Path | None) -> tuple[Settings, str]:
    """Return the settings with the chosen preset in the place of AUTO, and the reason for the
    choice. Settings with a preset of the user's are returned as they are, with an empty text."""
    if settings.preset != AUTO:  # by value: a copy comes to another process
        return settings, ""
    known = known_of(opened, settings, store)
    choice = choose(known) or _replayed(opened, settings, known)
    chosen = replace(preset(choice.preset), note=known.note) if known.note else choice.preset
    return replace(settings, preset=chosen), choice.why


def _replayed(opened: "MoeModel", settings: Settings, known: Known) -> PresetChoice:
    """Return the candidate that is the fastest in a replay with what is measured now. Raises
    BadUsage for a budget below one expert in each place that needs one."""
    from runtime.policies.presets import CANDIDATES, Scope
    from runtime.replay.candidates import fastest
    from runtime.session.run_costs import by_device, road_costs

    decides = settings.decide == ways.DEVICE
    names = tuple(name for name in CANDIDATES if not decides or name in by_device(settings))
    is_per_layer = Scope(settings.scope or AUTO.scope) is Scope.LAYER
    sizes.num_slots(
        settings.budget, opened.shape, per_layer=is_per_layer, num_devices=settings.devices
    )
    share = sizes.budget_nbytes(settings.budget, opened.shape) / opened.shape.nbytes
    roads = road_costs(opened, settings)
    name, ms = fastest(roads, opened.shape, share, names=names, scope=settings.scope)
    if name == "horizon" and known.has_predictors:
        return PresetChoice("foresight", "as horizon, by the predictors of the store")
    return PresetChoice(name, f"the fastest of {len(names)} by replay, {ms:.3g} ms a token")


def known_of(opened: "MoeModel", settings: Settings, store: Path | None) -> Known:
    """Return what model, budget and store say."""
    looks = store and not settings.policies
    tuned, has_predictors, note = _stored(opened, settings, store) if looks else (None, False, "")
    return Known(
        names_policies=bool(settings.policies),
        fits=sizes.budget_nbytes(settings.budget, opened.shape) >= opened.shape.nbytes,
        tuned=tuned,
        has_predictors=has_predictors,
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
