"""Models as commands open them, without the messages of the libraries below."""

from pathlib import Path

from transformers.utils import logging

from artifacts.store.runs import ModelInfo
from runtime.devices import resolve_device
from runtime.model.open import MoeModel, open_model


def quieten() -> None:
    """Silence transformers: its advice does not apply to moectl's users."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def open_quietly(name: str, *, device: str = "auto", dense: int | None = None) -> MoeModel:
    """Open a checkpoint, a folder or hub id, on a device as the user names it; `dense` is as for
    `open_model`."""
    quieten()
    return open_model(name, device=resolve_device(device), dense=dense)


def model_info(name: str, opened: MoeModel) -> ModelInfo:
    """Describe an opened model for the store."""
    return ModelInfo(name, opened.fingerprint, opened.family, opened.stored_shape)


def existing(store: Path) -> Path | None:
    """Return the path of the store, None when there is no such file: most runs need no store."""
    return store if store.exists() else None
