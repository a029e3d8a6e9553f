"""Fast-tier memory of a model besides its routed experts: all other weights, and the attention
cache.

Computed from the fields of a published config alone. Biases and norms, a few thousandths of it, are
not counted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from artifacts.errors import BadInput
from artifacts.formats.dense import dense_nbytes
from artifacts.formats.stated import Stated, stated_quantisation
from artifacts.modelshapes.attention import ATTENTIONS, Attention, attention_of, needed
from artifacts.modelshapes.known import (
    MODELS,
    Matrix,
    ModelShape,
    gated,
    matrix_nbytes,
    moe_layers,
    read_config,
    read_quantisation,
)
from artifacts.modelshapes.row_tables import row_tables


@dataclass(frozen=True, slots=True)
class Backbone:
    """A model without its routed experts. `dense`: intermediate size of the layers that have no
    experts, which are the first ones unless `dense_layers` names them; `shared`: name of the
    experts that every token uses; `tables`: embeddings that are read by row."""

    num_layers: int
    attention: Attention
    dense: int = 0
    is_tied: bool = False
    dense_layers: tuple[int, ...] = ()
    shared: str = "shared_experts"
    quantisation: Stated | None = None
    tables: tuple[Matrix, ...] = ()


@dataclass(frozen=True, slots=True)
class BackboneMemory:
    """Bytes of all weights except routed experts, in memory and in the checkpoint's files, and of
    the attention cache for one token. In memory every weight has the model's own dtype, unless it
    is kept in few bits. Of the files, `tables_nbytes` are tables that are read by row and are not
    in memory."""

    weights_nbytes: int
    stored_nbytes: int
    cache_nbytes: int
    tables_nbytes: int = 0


def _published(quantization: Mapping) -> Stated | None:
    return stated_quantisation({"quantization_config": quantization})


# By name: all layers, and the intermediate size of those without experts, where there are any.
_LAYERS = {
    "deepseek-v2-lite": (27, 10944),
    "deepseek-v2": (60, 12288),
    "deepseek-v3": (61, 18432),
}
_QUANTISED = {
    "deepseek-v3": _published({"quant_method": "fp8"}),
    "qwen3-235b-a22b-fp8": _published(
        {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
    ),
    "qwen3-235b-a22b-gptq-int4": _published({"quant_method": "gptq", "bits": 4, "group_size": 128}),
}


def backbone_of(name: str) -> Backbone:
    """Return the backbone of a model from the table of shapes, a config.json or the folder that
    holds it; an existing path wins."""
    path = Path(name)
    if not path.exists():
        num_layers, dense = _LAYERS.get(name, (MODELS[name].shape.num_layers, 0))
        return Backbone(num_layers, ATTENTIONS[name], dense, quantisation=_QUANTISED.get(name))
    return from_config(path / "config.json" if path.is_dir() else path)


def backbone_memory(
    model: ModelShape, backbone: Backbone, *, dense: int | None = None
) -> BackboneMemory:
    """Return the bytes that a model needs besides its routed experts, in memory with linear layers
    at `dense` bits if that is given. Raises BadInput when it has fewer layers than MoE layers."""
    shape = model.shape
    hidden = model.hidden
    if backbone.num_layers < shape.num_layers:
        raise BadInput(
            f"{model.name} has {backbone.num_layers} layers and {shape.num_layers} MoE layers: "
            "mend its config"
        )
    embeddings = model.vocabulary * hidden
    routers = shape.num_layers * shape.num_experts * hidden
    matrices = list(_matrices(model, backbone))
    shapes = [(rows, columns) for _, rows, columns in matrices]
    packed = [*shapes, (model.vocabulary, hidden)] if backbone.is_tied else shapes
    plain = routers if backbone.is_tied else routers + embeddings
    memory = plain * model.dtype_nbytes
    memory += sum(
        dense_nbytes(*shape, bits=dense, dtype_nbytes=model.dtype_nbytes) for shape in packed
    )
    stored = (embeddings + routers) * model.dtype_nbytes
    stored += sum(
        matrix_nbytes(backbone.quantisation, *matrix, model.dtype_nbytes) for matrix in matrices
    )
    tables = sum(
        matrix_nbytes(backbone.quantisation, *table, model.dtype_nbytes)
        for table in backbone.tables
    )
    cache = backbone.num_layers * backbone.attention.cache_width * model.dtype_nbytes
    return BackboneMemory(round(memory), round(stored + tables), round(cache), tables)


def _matrices(model: ModelShape, backbone: Backbone) -> Iterator[Matrix]:
    """Every matrix besides routed experts, their routers and the embeddings."""
    hidden = model.hidden
    num_layers = backbone.num_layers
    shared = round(model.shared_nbytes / (3 * hidden * model.dtype_nbytes))
    dense_layers = backbone.dense_layers or range(num_layers - model.shape.num_layers)
    for layer in range(num_layers):
        for name, rows, columns in backbone.attention.matrices(hidden):
            yield f"layers.{layer}.self_attn.{name}", rows, columns
        is_dense = layer in dense_layers
        yield from gated(f"layers.{layer}.mlp", hidden, backbone.dense if is_dense else 0)
        yield from gated(f"layers.{layer}.mlp.{backbone.shared}", hidden, 0 if is_dense else shared)
    if not backbone.is_tied:
        yield "lm_head", model.vocabulary, hidden


def from_config(path: Path) -> Backbone:
    """Read the backbone from a transformers config.json. Raises BadInput."""
    config = read_config(path)
    num_layers = needed(config, path, "num_hidden_layers")
    sparse = moe_layers(config, path)
    return Backbone(
        num_layers=num_layers,
        attention=attention_of(config, path),
        dense=config.get("intermediate_size") or 0,
        is_tied=bool(config.get("tie_word_embeddings")),
        dense_layers=tuple(layer for layer in range(num_layers) if layer not in sparse),
        shared="shared_expert"
        if config.get("shared_expert_intermediate_size")
        else "shared_experts",
        quantisation=read_quantisation(path),
        tables=tuple(row_tables(config, path)),
    )
