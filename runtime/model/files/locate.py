"""Finds a model by the name that the user typed: a local path if it exists, otherwise what another
program keeps here, otherwise the hub."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from artifacts.common.suggestions import nearest
from artifacts.common.untrusted import existing, has_json, read_json, readable
from artifacts.errors import BadInput
from artifacts.formats.gguf.gguf_header import MAGIC, read_header
from artifacts.modelshapes.repositories import REPOSITORIES
from runtime.model.files.hub.kept import path_elsewhere
from runtime.model.files.hub.names import HubName, hub_name
from runtime.model.files.hub.quants import GGUF, PART, WANTED, SeveralQuants
from runtime.model.files.hub.repository import Download, cached, look_up

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BESIDE = ("adapter", "imatrix", "mmproj", "vocab")  # `general.type` of files that are no model


@dataclass(frozen=True, slots=True)
class Here:
    """A model that is on this machine, as a `Download` of which nothing is missing."""

    path: Path
    missing_nbytes: int = 0

    def fetch(self) -> Path:
        """Return the path."""
        return self.path

    def describe(self, folder: Path) -> Path:
        """Return the path, and write nothing into `folder`."""
        return self.path


def find(name: str) -> Here | Download:
    """Look for the model `name` without downloading it. A name is a path, one of the hub (in
    `hub.names`), or Ollama's own.

    Raises BadInput for a name that is none, within seconds also where the hub does not answer, and
    SeveralQuants where a repository has several models and the name does not say which.
    """
    path = existing(name)
    if path is None:
        return _by_name(name)
    if path.is_dir():
        return Here(only_gguf(path) or path)
    if path.suffix.lower() != GGUF and not _begins_as_gguf(path):
        raise BadInput(
            f"{name} is a file: give the folder that holds the model's config.json, or a GGUF file"
        )
    return Here(path)


def locate(name: str) -> Path:
    """Return the folder of the model that `find` finds, or its GGUF file, which is downloaded first
    if it is only on the hub. Raises what `find` and `Download.fetch` raise."""
    return find(name).fetch()


@contextmanager
def described(name: str) -> Iterator[Path]:
    """Yield a path that has all that a model says of itself, within the block: a folder with a
    config.json, a file as it was named, or a GGUF file, all parts of it.

    Of a model that is only on the hub the config or the headers are read, and no weights: the GGUF
    file is then a temporary one with a hole in their place. Raises what `find` raises.
    """
    path = existing(name)
    if path is not None and not path.is_dir():
        yield path
        return
    with TemporaryDirectory(prefix="moectl-") as folder:
        yield find(name).describe(Path(folder))


@lru_cache  # a command asks several times, and must not get two revisions
def _by_name(text: str) -> Here | Download:
    if path := path_elsewhere(text):
        return Here(path)
    check_name(text)
    name = hub_name(text)
    try:
        return look_up(name)
    except (LookupError, ConnectionError) as error:
        return Here(_offline(text, name, error))


def _offline(text: str, name: HubName, refusal: Exception) -> Path:
    """Return the model as it was downloaded before. Raises BadInput that says how to get it."""
    remedy = "check the path, the id or the network"
    if isinstance(refusal, ConnectionError):
        include = name.quant and f" --include '*{name.quant}*'"
        remedy += f", or give the folder that `hf download {name.repo}{include}` makes elsewhere"
    try:
        return cached(name)
    except SeveralQuants:
        raise
    except FileNotFoundError as error:
        raise BadInput(f"{_missing(text)} ({refusal}): {remedy}") from error
    except BadInput as error:
        raise BadInput(f"{error}, and the hub gives no more ({refusal}): {remedy}") from error


def _begins_as_gguf(path: Path) -> bool:
    """Return whether a file under another name, as Ollama's, is a GGUF file."""
    if not readable(path):
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def check_name(name: str) -> None:
    """Raise BadInput for a name that is no path here and cannot be one of the hub or of another
    program's model."""
    if not (existing(name) or hub_name(name) or path_elsewhere(name)):
        raise BadInput(f"{_missing(name)}: check the path; a hub id is owner/name")


def read_config(folder: Path) -> dict:
    """Return `config.json` as stored; BadInput if it is missing or not JSON."""
    path = folder / "config.json"
    if not has_json(path):
        raise BadInput(f"{folder} has no config.json: it is not a transformers model folder")
    try:
        config = read_json(path)
    except ValueError as error:
        raise BadInput(f"{path} is not JSON ({error}): download it again") from error
    if not isinstance(config, dict):
        raise BadInput(
            f"{path} holds a {type(config).__name__} instead of a JSON object: download it again"
        )
    return config


def only_gguf(folder: Path) -> Path | None:
    """Return the GGUF file of a folder, or the first of a model in several parts; None if the
    folder has other weights.

    Raises BadInput if the folder has several models. A file that only belongs to a model, such as
    the encoder of its images, does not count.
    """
    files = sorted(
        path for path in folder.glob("*") if path.suffix.lower() == GGUF and not path.is_dir()
    )
    if not files or any(folder.glob("*.safetensors")):
        return None
    models: dict[tuple[str, ...], Path] = {}
    for path in files:
        models.setdefault(_model_of(path.name), path)
    firsts = list(models.values())
    if len(firsts) > 1:
        firsts = [path for path in firsts if not _is_beside(path)] or firsts
    if len(firsts) > 1:
        raise BadInput(
            f"{folder} has {len(firsts)} models in GGUF: give the file of one, as {firsts[0]}"
        )
    return firsts[0]


def _model_of(name: str) -> tuple[str, ...]:
    """Return what the names of all files of a model in GGUF have in common."""
    found = PART.fullmatch(name)
    return (found["stem"], found["count"]) if found else (name,)


def _is_beside(path: Path) -> bool:
    """Return whether a file belongs to a model without being one, by its name or by its header."""
    if "mmproj" in path.name.lower():
        return True
    try:
        entries = read_header(path).entries
    except BadInput:
        return False
    return entries.get("general.architecture") == "clip" or entries.get("general.type") in _BESIDE


def is_gguf(path: Path) -> bool:
    """Return whether the path that `locate` found is a GGUF file, not a folder of safetensors."""
    return path.is_file()


def weight_files(path: Path) -> list[Path]:
    """Return the weight files of the model that `locate` found."""
    return parts_of(path) if is_gguf(path) else safetensors_files(path)


def safetensors_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder, as its index names them if there are several.

    Raises BadInput for a folder without any, and for an index that is none or points out of the
    folder.
    """
    if readable(folder / SINGLE):
        return [folder / SINGLE]
    if readable(folder / INDEX):
        return [folder / name for name in sorted(set(read_index(folder / INDEX).values()))]
    if any(folder.glob("*.bin")):
        raise BadInput(
            f"{folder} holds pickled weights (*.bin), which can run code when read: convert them "
            "to safetensors first"
        )
    if any(folder.glob("*.safetensors")):
        raise BadInput(
            f"{folder} holds neither {SINGLE} nor {INDEX}, which says which of its *.safetensors "
            "are the model's: download that file too"
        )
    raise BadInput(
        f"{folder} holds neither {SINGLE} nor {INDEX}: the weights are missing, download the "
        "model again"
    )


def read_index(index: Path) -> Mapping[str, str]:
    """Return the name of the file that holds each tensor, by the tensor's name; files are in the
    folder of the index. Raises BadInput."""
    try:
        files = read_json(index)["weight_map"]
        names = files.values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(
            f"{index} is not an index of safetensors shards ({error}): download it again"
        ) from error
    for name in names:
        if not _is_file_name(name):
            shown = repr(name)[:80]
            raise BadInput(
                f"{index} points to {shown}, no file of its folder: such a checkpoint is not opened"
            )
    return files


def _is_file_name(name: object) -> bool:
    if not isinstance(name, str) or not name or "\0" in name or Path(name).name != name:
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half a character
        return False
    return True


def other_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder of safetensors besides its weights and their index. Raises
    BadInput for one that cannot be read."""
    for path in (path for pattern in WANTED for path in sorted(folder.glob(pattern))):
        if (
            path.suffix != ".safetensors"
            and path.name != INDEX
            and path.is_file()
            and readable(path)
        ):
            yield path


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model, all of them where a GGUF file's name says that it is one of
    several.

    Raises BadInput where one of several is missing.
    """
    found = PART.fullmatch(path.name)
    if found is None:
        return [path]
    if not 1 <= int(found["number"]) <= int(found["count"]):
        raise BadInput(
            f"{path} is no part by its name: give the file the name that it was downloaded with"
        )
    before = path.name[: found.start("number")]
    behind = path.name[found.end("number") :]
    parts = [
        path.with_name(f"{before}{number:05}{behind}")
        for number in range(1, int(found["count"]) + 1)
    ]
    for part in parts:
        if not part.is_file():
            raise BadInput(
                f"{part} is missing: the model is in several files, so download this one too"
            )
    return parts


def local_gguf(name: str) -> Path | None:
    """Return the GGUF file of a local path, which is that file or its folder; None for another
    model. Raises BadInput."""
    path = existing(name)
    if path is None or path.is_file():
        return path if path and path.suffix.lower() == GGUF else None
    return only_gguf(path)


def _missing(name: str) -> str:
    """Return the beginning of the refusal: what the name is not, and the nearest model folder
    beside it, or known name."""
    path = Path(name)
    try:
        folders = [
            folder.name for folder in path.parent.iterdir() if (folder / "config.json").is_file()
        ]
    except (OSError, ValueError):
        folders = []
    if guess := nearest(path.name, folders):
        guess = path.parent / guess
    elif hub_name(name) is None:
        guess = nearest(name, REPOSITORIES)
    told = f" (did you mean {guess}?)" if guess else ""
    return f"{name!r} is neither a folder here{told} nor reachable as a hub id"
