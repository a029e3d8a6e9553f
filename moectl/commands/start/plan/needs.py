"""What a model needs, by any of its names: its shape, and the memory beside routed experts."""

from dataclasses import dataclass, replace
from pathlib import Path

from artifacts.common.untrusted import existing
from artifacts.modelshapes.known import MODELS, ModelShape, model_shape
from artifacts.modelshapes.memory import BackboneMemory, backbone_memory, backbone_of
from artifacts.modelshapes.repositories import REPOSITORIES
from runtime.model.files.hub.kept import path_elsewhere
from runtime.model.files.hub.names import hub_name
from runtime.model.files.locate import described
from runtime.model.gguf.shape import gguf_shape


@dataclass(frozen=True, slots=True)
class Needs:
    """A model and the memory that it needs beside routed experts; `is_gguf`: one file in one
    quant."""

    model: ModelShape
    memory: BackboneMemory
    is_gguf: bool = False


def needs_of(name: str, dense: int | None) -> Needs:
    """Read what a model needs from the table of shapes, its config or the header of its GGUF file,
    of which nothing else is fetched from the hub; linear layers have `dense` bits if that is given.
    Raises BadUsage or BadInput."""
    if known := known_name(name):
        return Needs(MODELS[known], _memory(MODELS[known], known, dense))
    if not (existing(name) or hub_name(name) or path_elsewhere(name)):
        model_shape(name)  # which raises, with the nearest name
    with described(name) as path:
        shown = path.name if existing(name) else name
        if path.is_file() and path.suffix != ".json":
            model, memory = gguf_shape(path, dense=dense)
            return Needs(replace(model, name=shown), memory, is_gguf=True)
        model = model_shape(str(path))
        memory = _as_stored(model, _memory(model, str(path), dense), path)
        return Needs(model if existing(name) else replace(model, name=shown), memory)


def _as_stored(model: ModelShape, memory: BackboneMemory, path: Path) -> BackboneMemory:
    """Return the memory without layers that draft where the weights are here and have none:
    transformers leaves them out when it saves a model, but not from its config."""
    held = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    told = model.shape.nbytes + memory.stored_nbytes
    if not held or held > told - memory.drafting_nbytes / 2:
        return memory
    stored = memory.stored_nbytes - memory.drafting_nbytes
    return replace(memory, stored_nbytes=stored, drafting_nbytes=0)


def known_name(name: str) -> str | None:
    """Return the name in the table of a model that is named so, or by its repository; None for
    another one, and for a path."""
    if existing(name) is not None:
        return None
    if name.lower() in MODELS:
        return name.lower()
    named = hub_name(name)
    ids = {each.hub: short for short, each in REPOSITORIES.items()}
    return ids.get(str(named)) if named else None


def _memory(model: ModelShape, name: str, dense: int | None) -> BackboneMemory:
    return backbone_memory(model, backbone_of(name), dense=dense)
