"""Finds the folder of a model by the name that the user typed: a local path if it exists, otherwise
the hub."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from artifacts.common.suggestions import nearest
from artifacts.common.untrusted import existing, has_json, read_json, readable
from artifacts.errors import BadInput, first_line
from artifacts.formats.gguf.gguf_header import read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GGUF = ".gguf"
# the name of a part of a model
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?i:\.gguf)")
_BESIDE = ("adapter", "imatrix", "mmproj", "vocab")  # `general.type` of files that are no model
_ANSWER_S = 5.0  # how long the hub may take to answer
# Weights, config and tokenizer; no pickles, no code.
WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def locate(name: str) -> Path:
    """Return the folder of the model `name`, a local folder or a hub id, or its GGUF file. The file
    is named by its path, or by the folder that holds it and no other weights. Download only if no
    such path exists.

    Raises BadInput for a name that is neither, within seconds also where the hub does not answer.
    """
    path = existing(name)
    if path is None:
        check_name(name)
        return _download(name)
    if path.is_dir():
        return only_gguf(path) or path
    if path.suffix.lower() != GGUF:
        raise BadInput(
            f"{name} is a file: give the folder that holds the model's config.json, or a GGUF file"
        )
    return path


def check_name(name: str) -> None:
    """Raise BadInput for a name that is no path here and cannot be a hub id, which is
    owner/name."""
    if existing(name) is None and (name.startswith(("/", ".", "~")) or name.count("/") != 1):
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
        found = PART.fullmatch(path.name)
        models.setdefault((found["stem"], found["count"]) if found else (path.name,), path)
    firsts = list(models.values())
    if len(firsts) > 1:
        firsts = [path for path in firsts if not _is_beside(path)] or firsts
    if len(firsts) > 1:
        raise BadInput(
            f"{folder} has {len(firsts)} models in GGUF: give the file of one, as {firsts[0]}"
        )
    return firsts[0]


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


def _download(name: str) -> Path:
    from httpx2 import HTTPError
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    wanted = {"allow_patterns": WANTED, "ignore_patterns": ["*/*"]}
    try:
        # Asked here, since snapshot_download asks without a limit on the time.
        revision = HfApi().model_info(name, timeout=_ANSWER_S).sha
        return Path(snapshot_download(name, revision=revision, **wanted))
    except (OSError, HTTPError, HFValidationError) as error:
        try:
            return Path(snapshot_download(name, local_files_only=True, **wanted))
        except (LocalEntryNotFoundError, HFValidationError):
            raise BadInput(
                f"{_missing(name)} ({_reason(error)}): check the path, the id or the network"
            ) from error


def _missing(name: str) -> str:
    """Return the beginning of the refusal: what the name is not, and the nearest model folder
    beside it."""
    path = Path(name)
    try:
        folders = [
            folder.name for folder in path.parent.iterdir() if (folder / "config.json").is_file()
        ]
    except (OSError, ValueError):
        folders = []
    guess = nearest(path.name, folders)
    told = f" (did you mean {path.parent / guess}?)" if guess else ""
    return f"{name!r} is neither a folder here{told} nor reachable as a hub id"


def _reason(error: Exception) -> str:
    """Return in a few words why the hub gave no model."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    match error:
        case GatedRepoError():
            return "the hub wants an account with access to it"
        case RepositoryNotFoundError():
            return "the hub has no such model, or a private one"
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set"
        case HFValidationError():
            return "it is no hub id"
    return first_line(error).rstrip(".")
