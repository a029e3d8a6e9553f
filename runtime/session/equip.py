"""What a session sets out with: the model on its base, the preset that was meant, and what the store knows of both."""

from dataclasses import replace
from pathlib import Path

from artifacts.errors import BadInput
from artifacts.shape import FULL_BITS
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.policies.presets import Preset
from runtime.session.on_base import on_base
from runtime.session.settings import Settings


def equipped(
    opened: MoeModel, settings: Settings, *, name: str, store: Path | None, base: int
) -> tuple[MoeModel, Settings, Artefacts]:
    """As a session takes them; `name` is what the model is called in errors. Without a store nothing is known. Raises
    BadInput for one that is not there, Incompatible."""
    known = Artefacts()
    if store is not None:
        if not store.exists():
            raise BadInput(f"there is no store {store}; moectl profile makes one")
        settings = _meant(opened, settings, store)
        known = _artefacts(opened, settings, name=name, store=store, base=base)
    opened, artefacts = on_base(opened, known, base)
    return opened, settings, artefacts


def _meant(opened: MoeModel, settings: Settings, store: Path) -> Settings:
    """With this model's own, where a tuned preset's name is that of several."""
    if not isinstance(settings.preset, Preset):
        return settings
    from runtime.session.presets import find_presets

    own = find_presets([settings.preset.name], store, model_id=opened.fingerprint[:16])
    return replace(settings, preset=own.get(settings.preset.name, settings.preset))


def _artefacts(opened: MoeModel, settings: Settings, *, name: str, store: Path, base: int) -> Artefacts:
    """What the base and the chosen policies want; a store they do not need is not opened, and one of another model is
    refused only where they cannot do without it."""
    is_packed = base != FULL_BITS
    if not (settings.wants or is_packed):
        return Artefacts()
    from artifacts.store.store import Store  # a run that wants nothing of one has no need of what it takes in memory
    from runtime.session.artefacts import load_artefacts

    with Store.open(store, read_only=True) as held:
        is_needed = is_packed or settings.requires and not settings.learn
        if not is_needed and opened.fingerprint not in {model.fingerprint for model in held.models()}:
            return Artefacts()
        model = held.require_model(opened.fingerprint, name=name)
        return load_artefacts(held, model.model_id, opened.shape, wants=settings.wants)
