"""Models that are on this machine already: in the hub's cache, and in the folders of LM Studio and
Ollama."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from artifacts.common.untrusted import read_json
from artifacts.errors import BadInput
from runtime.model.files.hub.names import HubName, hub_name
from runtime.model.files.hub.quants import SeveralQuants, chosen, quants_of
from runtime.model.files.hub.repository import entry, files_in

_WEIGHTS = "application/vnd.ollama.image.model"
_REGISTRY = "registry.ollama.ai"
_LIBRARY = "library"  # where the registry has models that are named without an owner
_LATEST = "latest"


class KeptModel(NamedTuple):
    """A model on this machine: the name that opens it, the bytes of its files, its path, and the
    program whose folder has it."""

    name: str
    nbytes: int
    path: Path
    where: str


def kept_models() -> list[KeptModel]:
    """Return the models that are found, by name. A model that lacks files is among them."""
    return sorted((*_in_hub_cache(), *_in_lm_studio(), *_in_ollama()))


def path_elsewhere(text: str) -> Path | None:
    """Return the path of a model that LM Studio or Ollama has under a name; None for none.

    The name may be Ollama's own, as `gpt-oss:20b`, and for what Ollama took from the hub, and for
    LM Studio's, that of the hub. A revision is only on the hub. Raises SeveralQuants.
    """
    if path := _ollama_blob(text):
        return path
    name = hub_name(text)
    if name is None or name.revision:
        return None
    return next(filter(None, (_chosen_in(place / name.repo, name) for place in _lm_studio())), None)


def _chosen_in(folder: Path, name: HubName) -> Path | None:
    if not folder.is_dir():
        return None
    try:
        return entry(folder, chosen(name.repo, files_in(folder), name.quant))
    except SeveralQuants:
        raise
    except BadInput:  # it lacks the model, which the hub may have
        return None


def _in_hub_cache() -> Iterator[KeptModel]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repo in (repo for repo in repos if repo.repo_type == "model" and repo.revisions):
        newest = max(repo.revisions, key=lambda each: ("main" in each.refs, each.last_modified))
        revision = "" if "main" in newest.refs else f"@{newest.commit_hash}"
        for model in _models_in(newest.snapshot_path, repo.repo_id, "hub cache"):
            yield model._replace(name=model.name + revision)


def _in_lm_studio() -> Iterator[KeptModel]:
    for place in _lm_studio():
        for folder in sorted(place.glob("*/*")):
            yield from _models_in(folder, folder.relative_to(place).as_posix(), "LM Studio")


def _models_in(folder: Path, repo: str, where: str) -> Iterator[KeptModel]:
    """Yield the models of a folder that is laid out as a repository."""
    files = files_in(folder)
    weights = [name for name in files if name.endswith(".safetensors") and "/" not in name]
    if weights and "config.json" in files:
        yield KeptModel(repo, sum(files[name] for name in weights), folder, where)
    for quant in quants_of(files):
        yield KeptModel(f"{repo}:{quant.name}", quant.nbytes, folder / quant.files[0], where)


def _in_ollama() -> Iterator[KeptModel]:
    for place in _ollama():
        manifests = place / "manifests"
        for manifest in sorted(path for path in manifests.glob("*/*/*/*") if path.is_file()):
            *owner, model, tag = manifest.relative_to(manifests).parts
            repo = "/".join([*owner, model]).removeprefix(f"{_REGISTRY}/")
            name = f"{repo.removeprefix(f'{_LIBRARY}/')}:{tag}"
            if blob := _blob(place, manifest):
                yield KeptModel(name, blob.stat().st_size, blob, "Ollama")


def _ollama_blob(text: str) -> Path | None:
    """Return the GGUF file of a model that Ollama has by this name, or by this one on the hub."""
    repo, _, tag = text.partition(":")
    parts = repo.split("/")
    if not all(parts) or ".." in (*parts, tag):
        return None
    above = {1: [f"{_REGISTRY}/{_LIBRARY}"], 2: [_REGISTRY, "hf.co"]}.get(len(parts), [""])
    found = (
        _blob(place, place.joinpath("manifests", each, *parts, tag or _LATEST))
        for place in _ollama()
        for each in above
    )
    return next(filter(None, found), None)


def _blob(place: Path, manifest: Path) -> Path | None:
    """Return the GGUF file that a manifest names, None where either is missing or no such file."""
    try:
        layers = read_json(manifest)["layers"]
        digest = next(layer["digest"] for layer in layers if layer["mediaType"] == _WEIGHTS)
        blob = place / "blobs" / digest.replace(":", "-")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration, BadInput):
        return None
    return blob if blob.is_file() else None


def _lm_studio() -> list[Path]:
    home = Path.home()
    places = home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"
    return [place for place in places if place.is_dir()]


def _ollama() -> list[Path]:
    """Return where Ollama keeps models: for this user, or as a service."""
    places = (
        os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models",
        "/usr/share/ollama/.ollama/models",
    )
    return [place for place in map(Path, places) if place.is_dir()]
