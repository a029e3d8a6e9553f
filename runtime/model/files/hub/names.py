"""Names of models on the hub, as people type them."""

import re
from typing import NamedTuple

from artifacts.modelshapes.repositories import REPOSITORIES

_HOST = re.compile(r"(https?://)?(huggingface\.co|hf\.co)/")
_NAME = re.compile(r"(?P<repo>[^:@]+?)/?(:(?P<quant>[^:@]+))?(@(?P<revision>.+))?")


class HubName(NamedTuple):
    """Name of a model on the hub: `quant` picks one of several GGUF models in a repository,
    `revision` is a branch, a tag or a commit. Both are empty where the name does not say them."""

    repo: str
    quant: str = ""
    revision: str = ""

    def __str__(self) -> str:
        quant = self.quant and f":{self.quant}"
        return f"{self.repo}{quant}{self.revision and f'@{self.revision}'}"


def hub_name(text: str) -> HubName | None:
    """Return the name that is meant by `owner/name`, `owner/name:Q4_K_M`, `owner/name@revision`,
    any of these behind `hf.co/`, or `qwen3-30b-a3b` in the place of `owner/name`; None for a text
    that can be no model's on the hub."""
    found = _NAME.fullmatch(_HOST.sub("", text) if _HOST.match(text) else text)
    if found is None:
        return None
    repo, quant, revision = (found[part] or "" for part in ("repo", "quant", "revision"))
    if known := REPOSITORIES.get(repo.lower()):
        repo = known.gguf if quant and known.gguf else known.hub
    if repo.startswith(("/", ".", "~")) or repo.count("/") != 1:
        return None
    return HubName(repo, quant, revision)
