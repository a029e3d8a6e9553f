"""Finds the folder of a model by the name that the user typed: a local path if it exists, otherwise the hub."""

from pathlib import Path

from artifacts.common.untrusted import existing, read_json
from artifacts.errors import BadInput, first_line
from runtime.model.config_fields import quantisation

# Weights, config and tokenizer; no pickles, no code.
WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def locate(name: str) -> Path:
    """Return the folder of the model `name`, a local folder or a hub id; download only if no such path exists."""
    path = existing(name)
    if path is not None and path.is_dir():
        return path
    if path is not None:
        raise BadInput(f"{name} is a file: give the folder that holds the model's config.json")
    return _download(name)


def read_config(folder: Path) -> dict:
    """Return `config.json` as stored; BadInput if it is missing, not JSON, or of a quantised checkpoint."""
    path = folder / "config.json"
    if not path.is_file():
        raise BadInput(f"{folder} has no config.json: it is not a transformers model folder")
    try:
        config = read_json(path)
    except ValueError as error:
        raise BadInput(f"{path} is not JSON ({error}): download it again") from error
    if not isinstance(config, dict):
        raise BadInput(f"{path} holds a {type(config).__name__} instead of a JSON object: download it again")
    if (quantised := quantisation(config)) is not None:
        raise BadInput(f"{folder} is quantised ({_method(quantised)}): moectl opens unquantised checkpoints only")
    return config


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    missing = f"{name!r} is neither a folder here nor reachable as a hub id"
    if name.startswith(("/", ".", "~")):
        raise BadInput(f"{missing}: check the path")
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=["*/*"]))
    except (OSError, HFValidationError) as error:  # every network and hub failure is an OSError
        raise BadInput(f"{missing}: check the path, the id or the network ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """Return the first line of the hub's error, without the advice that follows."""
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    return first_line(cause).rstrip(".")


def _method(quantised: object) -> str:
    return str(quantised.get("quant_method", "unknown method") if isinstance(quantised, dict) else quantised)
