"""Architectures of GGUF files that can be read, in the terms of transformers: their family, config
fields and names of tensors, as the package `gguf` (constants.py) and llama.cpp's
convert_hf_to_gguf.py write them. Each module holds those of one maker."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from artifacts.errors import BadInput
from runtime.model.gguf.layout import Architecture

ARCHITECTURES: Mapping[str, Architecture] = {
    name: form
    for module in iter_modules(__path__, f"{__name__}.")
    for name, form in import_module(module.name).ARCHITECTURES.items()
}
"""Architectures by the name that files give, `general.architecture`."""


def architecture_of(
    path: Path, entries: Mapping[str, object]
) -> tuple[Architecture, dict[str, object]]:
    """Return the architecture of a file, and its own entries without their prefix. Raises BadInput
    for an architecture that is not read, and for a model without experts."""
    name = str(entries.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise BadInput(
            f"{path} is a GGUF file of {name[:40]}: moectl reads {', '.join(sorted(ARCHITECTURES))}"
        )
    if not entries.get(f"{name}.expert_count"):
        raise BadInput(
            f"{path} has no experts ({name}.expert_count): moectl runs Mixture-of-Experts models"
        )
    prefix = f"{name}."
    own = {key[len(prefix) :]: value for key, value in entries.items() if key.startswith(prefix)}
    return ARCHITECTURES[name].of(own), own
