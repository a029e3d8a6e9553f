"""Presets and a store: tuned presets that the store holds, and artefacts in it that presets
require. Modules that read a store are imported only when they are needed: most presets are built in
and require nothing."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.errors import BadInput, Incompatible
from artifacts.shape import FULL_BITS
from runtime.policies import POLICIES, Policies
from runtime.policies.base import REMEDY
from runtime.policies.presets import Preset, Scope, presets

if TYPE_CHECKING:
    from artifacts.store.presets import PresetRecord


def find_presets(
    names: Iterable[str], store: Path, *, model_id: str | None = None
) -> dict[str, Preset]:
    """Find the tuned presets of the store among `names`, of model `model_id` if given, the newest
    of each name. Leaves out names of built-in presets and unknown names. Raises Incompatible for a
    preset that was tuned for other models only, BadInput for a damaged one."""
    wanted = [name for name in names if name not in presets()]
    if not wanted or not store.exists():
        return {}
    from artifacts.store.presets import stored_presets
    from artifacts.store.store import Store

    with Store.open(store, read_only=True) as opened:
        kept = stored_presets(opened)
        models = {model.model_id: model.name for model in opened.models()}
    tuned = {}
    for name in wanted:
        of_any = [preset for preset in kept if preset.preset.name == name]
        of_model = [preset for preset in of_any if model_id in (None, preset.model_id)]
        if of_any and not of_model:
            other = models.get(of_any[0].model_id, of_any[0].model_id)
            raise Incompatible(
                f"preset {name} was tuned for {other}, another model: run `moectl tune` with this "
                "one, or name one of `moectl inspect presets`"
            )
        if of_model:
            tuned[name] = as_preset(of_model[0])
    return tuned


_TABLES = {  # where an artefact that policies require lies
    "buddies": "buddies",
    "coactivated": "buddies",
    "entropy": "entropy",
    "splits": "splits",
    "replicas": "replicas",
    "predictors": "predictors",
    "maps": "expert_maps",
}


def check_stored(
    policies: Policies, store: Path, *, name: str, base: int = FULL_BITS, learns: bool = False
) -> None:
    """Raise Incompatible for a required artefact that the store has of no model, or not of the
    model that it knows as `name`. The error has the command that mends it. This check comes before
    the model is opened, which takes long; the rest is checked after that."""
    needs = {
        need: axis
        for axis in POLICIES
        for need in sorted(getattr(policies, axis).requires)
        if need in _TABLES
    }
    if learns:
        needs.pop("maps", None)
    if not needs and base == FULL_BITS:
        return
    held, others = _tables_held(store, name)
    for need, axis in needs.items():
        if _TABLES[need] not in held:
            of_others = f"{store} holds {others}, not {name}: " if others else ""
            raise Incompatible(f"{of_others}the {axis} policy needs {need}, {REMEDY[need]}")
    if base != FULL_BITS and "replicas" not in held:
        raise Incompatible(
            f"--base {base:g} takes stored replicas, and there are none: run `moectl quantize`"
        )


def _tables_held(store: Path, name: str) -> tuple[set[str], str]:
    """Return the tables that runs of a model wrote to, for the model that the store knows by this
    name. If it knows none, return the tables of all models, and the names of these models in
    words."""
    if not store.exists():
        return set(), ""
    from artifacts.store.store import Store

    with Store.open(store, read_only=True) as opened:
        models = opened.models()
        named = {model.model_id for model in models if model.name == name}
        runs = [run for run in opened.runs() if not named or run.info.model_id in named]
    others = "" if named else ", ".join(f"{model.name} ({model.model_id})" for model in models)
    return {table for run in runs for table in run.contents}, others


def tuned_presets(store: Path) -> list[Preset]:
    """Return the newest tuned preset of each name and model, the oldest of them first; none if the
    store does not exist."""
    if not store.exists():
        return []
    from artifacts.store.presets import stored_presets
    from artifacts.store.store import Store

    with Store.open(store, read_only=True) as opened:
        kept = reversed(stored_presets(opened))
    newest = {(preset.preset.name, preset.model_id): preset for preset in kept}
    return [as_preset(preset) for preset in newest.values()]


def as_preset(kept: "PresetRecord") -> Preset:
    """Return the preset, with the budget and machine that it was tuned for. Raises BadInput for a
    scope that does not exist."""
    one = kept.preset
    if one.scope not in (*Scope,):
        raise BadInput(
            f"preset {one.name} of run {kept.run_id} has scope {one.scope!r}: run `moectl tune` "
            "again"
        )
    return Preset(
        one.name,
        summary=f"tuned: loses at most {one.max_loss:.3g} of perplexity" if one.max_loss else
        "tuned: the fastest that loses nothing",
        paper="moectl tune",
        routing=one.routing,
        prefetch=one.prefetch,
        eviction=one.eviction,
        miss=one.miss,
        residency=one.residency,
        scope=one.scope,
        tuned_for=f"{one.budget} on {one.machine} (run {kept.run_id})",
        model_id=kept.model_id,
    )  # fmt: skip
