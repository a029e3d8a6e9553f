"""Models as commands open them: without a word from the libraries below, whose advice is not for moectl's users."""

from pathlib import Path

from transformers.utils import logging

from artifacts.store.runs import ModelInfo
from artifacts.store.store import Store
from runtime.model.open import MoeModel, open_model
from runtime.session.devices import resolve_device


def quieten() -> None:
    """From here on transformers says nothing of its own."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def there(store: Path) -> Path | None:
    """The store, if it has been made yet: most runs need none."""
    return store if store.exists() else None


def open_quietly(name: str, *, device: str = "auto") -> MoeModel:
    """Open a checkpoint, a folder or hub id, on a device as a user names it."""
    quieten()
    return open_model(name, device=resolve_device(device))


def model_info(name: str, opened: MoeModel) -> ModelInfo:
    return ModelInfo(name, opened.fingerprint, opened.family, opened.stored_shape)


def check_store(path: Path) -> None:
    """Raise now what would keep a profile from being written at the end: no folder, no store, another writer."""
    with Store.open(path):
        pass
