"""The models among the files of a repository: one of safetensors, or one for each quantisation in
GGUF."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from typing import NamedTuple

from artifacts.errors import BadInput

GGUF = ".gguf"
# the name of a part of a model
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?i:\.gguf)")
# Weights, config and tokenizer; no pickles, no code.
WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# in folders are other versions of a model; `consolidated` is Mistral's own format, once more
UNWANTED = ["*/*", "consolidated*"]
_BESIDE = ("mmproj", "imatrix")  # in names of files that only belong to a model
_QUANT = re.compile(
    r"(?i)(?:.*?[-./])?(?P<quant>(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|NVFP4\w*|BF16|F16|F32))"
)


class Quant(NamedTuple):
    """One of several models in GGUF: the word for it behind the colon of a name, its files, the
    first part first, and their bytes."""

    name: str
    files: tuple[str, ...]
    nbytes: int


class SeveralQuants(BadInput):
    """No model was named of the repository `repo`, which has several in GGUF, `quants`."""

    def __init__(self, repo: str, quants: list[Quant]) -> None:
        self.repo = repo
        self.quants = quants
        super().__init__(
            f"{repo} has {len(quants)} models in GGUF: name one, as "
            f"{repo}:{quants[len(quants) // 2].name}"
        )


def is_gguf_name(name: str) -> bool:
    """Return whether a file is one of GGUF, by its name."""
    return name.lower().endswith(GGUF)


def quants_of(files: Mapping[str, int]) -> list[Quant]:
    """Return the models in GGUF among files, given by name and bytes, the smallest first."""
    parts = _parts_by_stem(files)
    words = {stem: _word(stem) for stem in parts}
    times = Counter(words.values())
    found = [
        Quant(
            words[stem] if times[words[stem]] == 1 else stem,
            tuple(names),
            sum(files[name] for name in names),
        )
        for stem, names in parts.items()
    ]
    return sorted(found, key=lambda quant: quant.nbytes)


def _parts_by_stem(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each model in GGUF, by their name without a number and its ending."""
    parts: dict[str, list[str]] = {}
    for name in sorted(files):
        if is_gguf_name(name) and not any(word in name.lower() for word in _BESIDE):
            found = PART.fullmatch(name)
            parts.setdefault(found["stem"] if found else name[: -len(GGUF)], []).append(name)
    return parts


def _word(stem: str) -> str:
    """Return the type in the name of a file, without folders; the whole name where it has none."""
    name = stem.rpartition("/")[2]
    found = _QUANT.fullmatch(name)
    return found["quant"] if found else name


def chosen(repo: str, files: Mapping[str, int], quant: str) -> tuple[str, ...]:
    """Return which files of a repository are the model: those of `quant`, or without one its
    safetensors with all that belongs to them, or its only model in GGUF.

    Raises SeveralQuants, and BadInput where there is no such model or none that is read.
    """
    found = quants_of(files)
    if quant:
        return _named(repo, found, quant).files
    plain = plain_files(files)
    if "config.json" in plain and any(name.endswith(".safetensors") for name in plain):
        return plain
    if len(found) > 1:
        raise SeveralQuants(repo, found)
    if not found:
        pickles = any(name.endswith((".bin", ".pt", ".pth")) for name in files)
        has = "pickled weights, which can run code when read" if pickles else "no weights of either"
        raise BadInput(
            f"{repo} holds {has}: moectl opens safetensors with a config.json, and GGUF files; "
            "look for another repository of this model"
        )
    return found[0].files


def _named(repo: str, found: Iterable[Quant], name: str) -> Quant:
    """Return the model of this name, or of this first file. Raises BadInput."""
    for quant in found:
        if name.lower() in (quant.name.lower(), quant.files[0].lower()):
            return quant
    names = ", ".join(quant.name for quant in found) or "no GGUF file"
    raise BadInput(f"{repo} has no {name}: it has {names}")


def plain_files(files: Iterable[str]) -> tuple[str, ...]:
    """Return those files that a model in safetensors may consist of."""
    return tuple(
        name
        for name in sorted(files)
        if any(fnmatch(name, pattern) for pattern in WANTED)
        and not any(fnmatch(name, pattern) for pattern in UNWANTED)
    )
