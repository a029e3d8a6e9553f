"""Presets by name: those that come with moectl, and those that were tuned into a store."""

from collections.abc import Iterable
from pathlib import Path

from artifacts.errors import BadInput, Incompatible
from artifacts.store.presets import PresetRecord, stored_presets
from artifacts.store.store import Store
from runtime.policies.presets import Preset, Scope, presets


def find_presets(names: Iterable[str], store: Path, *, model_id: str | None = None) -> dict[str, Preset]:
    """Those of `names` that are the store's: of this model if given, the newest of each name. A name that nobody has is
    left to whoever takes presets by name. Raises Incompatible for one that was tuned for other models only."""
    wanted = [name for name in names if name not in presets()]
    if not wanted or not store.exists():
        return {}
    with Store.open(store, read_only=True) as opened:
        kept, models = stored_presets(opened), {model.model_id: model.name for model in opened.models()}
    found = {}
    for name in wanted:
        same = [one for one in kept if one.preset.name == name]
        own = [one for one in same if model_id in (None, one.model_id)]
        if same and not own:
            other = models.get(same[0].model_id, same[0].model_id)
            raise Incompatible(
                f"preset {name} was tuned for {other}, another model: run `moectl tune` with this one, or name one of "
                "`moectl inspect presets`"
            )
        if own:
            found[name] = as_preset(own[0])
    return found


def tuned_presets(store: Path) -> list[Preset]:
    """What was tuned into a store, of each name and model the newest, the oldest first; none where there is no
    store."""
    if not store.exists():
        return []
    with Store.open(store, read_only=True) as opened:
        kept = reversed(stored_presets(opened))
    return [as_preset(one) for one in {(one.preset.name, one.model_id): one for one in kept}.values()]


def as_preset(kept: PresetRecord) -> Preset:
    """What it was tuned for goes with it."""
    one = kept.preset
    if one.scope not in (*Scope,):
        raise BadInput(f"preset {one.name} of run {kept.run_id} has scope {one.scope!r}: run `moectl tune` again")
    return Preset(
        one.name,
        summary=f"tuned: the fastest that loses at most {one.max_loss:.3g} of perplexity" if one.max_loss else
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
