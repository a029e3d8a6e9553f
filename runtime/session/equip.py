"""Equips a session: the model with the experts of its base, the preset that the user means, and the
artefacts that the store holds for both."""

from dataclasses import replace
from pathlib import Path

from artifacts.errors import BadInput, Incompatible, OutOfResources
from artifacts.shape import FULL_BITS
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.policies.presets import Preset, preset
from runtime.session.settings import Settings
from runtime.tiers.replica_store import open_replicas


def equip(
    opened: MoeModel, settings: Settings, *, name: str, store: Path | None, base: int
) -> tuple[MoeModel, Settings, Artefacts]:
    """Return the model on a base of `base` bits, the settings with this model's own preset, and the
    artefacts, none without a store. Errors call the model `name`.

    Raises BadInput for a store that does not exist, Incompatible for artefacts that are missing or
    another model's.
    """
    artefacts = Artefacts()
    if store is not None:
        if not store.exists():
            raise BadInput(f"there is no store {store}; moectl profile makes one")
        settings = _with_own_preset(opened, settings, store)
        try:
            artefacts = _load(opened, settings, name=name, store=store, base=base)
        except OutOfResources as held:  # by another process, most often
            if base != FULL_BITS or settings.requires:
                raise
            note = f"what the store has for this preset is not used: {held}"
            settings = replace(settings, preset=replace(preset(settings.preset), note=note))
    opened, artefacts = model_on_base(opened, artefacts, base)
    return opened, settings, artefacts


def _with_own_preset(opened: MoeModel, settings: Settings, store: Path) -> Settings:
    """A store may hold tuned presets of one name for several models: take this model's."""
    if not isinstance(settings.preset, Preset):
        return settings
    from runtime.session.presets import find_presets

    presets = find_presets([settings.preset.name], store, model_id=opened.fingerprint[:16])
    return replace(settings, preset=presets.get(settings.preset.name, settings.preset))


def _load(opened: MoeModel, settings: Settings, *, name: str, store: Path, base: int) -> Artefacts:
    """Load the artefacts that the base and the policies take. A store that neither needs is not
    opened, and a store of another model is refused only where they require an artefact."""
    is_replicas = base != FULL_BITS
    if not (settings.wants or is_replicas):
        return Artefacts()
    # runs that want no artefact save the memory of these imports
    from artifacts.store.store import Store
    from runtime.session.artefacts import load_artefacts

    with Store.open(store, read_only=True) as held:
        is_required = is_replicas or settings.requires and not settings.learn
        if not is_required and opened.fingerprint not in {
            model.fingerprint for model in held.models()
        }:
            return Artefacts()
        model = held.require_model(opened.fingerprint, name=name)
        return load_artefacts(held, model.model_id, opened.shape, wants=settings.wants, base=base)


def model_on_base(opened: MoeModel, artefacts: Artefacts, bits: int) -> tuple[MoeModel, Artefacts]:
    """Return the model with its stored replicas of `bits` bits as the experts, in every tier and
    every count, and the artefacts that hold for it; both unchanged if the model has that base
    already. The two models share everything but the experts: one session at a time.

    Raises Incompatible, with the command that mends it, where there are no such replicas.
    """
    if bits == opened.base:
        return opened, artefacts
    if artefacts.replicas is None:
        raise Incompatible(
            f"--base {bits} takes stored replicas, and there are none: run `moectl quantize`"
        )
    replicas = artefacts.replicas.on_base(bits)
    store = open_replicas(opened, artefacts.replicas, [bits])[bits]
    shape = replace(opened.shape, expert_nbytes=store.layout.nbytes, num_neurons=0, neuron_nbytes=1)
    return replace(opened, store=store, shape=shape, base=bits), replace(
        artefacts, replicas=replicas
    )
