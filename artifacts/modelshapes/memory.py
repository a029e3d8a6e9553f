"""Fast-tier memory of a model besides its routed experts: all other weights, and the attention
cache.

Computed from the fields of a published config alone. Biases and norms, a few thousandths of it, are
not counted.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from artifacts.errors import BadInput
from artifacts.formats.dense import dense_nbytes
from artifacts.formats.stated import Stated, stated_quantisation
from artifacts.modelshapes.attention import ATTENTIONS, Attention, Matrix
from artifacts.modelshapes.fields import Fields
from artifacts.modelshapes.known import (
    MODELS,
    ModelShape,
    gated,
    matrix_nbytes,
    moe_layers,
    read_config,
    read_quantisation,
)
from artifacts.modelshapes.layer_kinds import Mixer, attentions_of
from artifacts.modelshapes.published import CONFIGS
from artifacts.modelshapes.row_tables import row_tables


@dataclass(frozen=True, slots=True)
class Backbone:
    """A model without its routed experts. `attentions` are those of its layers. `dense`:
    intermediate size of the layers that have no experts, which are the first ones unless
    `dense_layers` names them; `shared`: name of the experts that every token uses; `tables`:
    embeddings that are read by row; `beside`: matrices of other kinds; `num_drafting`: layers that
    predict further tokens (MTP), which are like the last one."""

    attentions: tuple[Attention | Mixer, ...]
    dense: int = 0
    is_tied: bool = False
    dense_layers: tuple[int, ...] = ()
    shared: str = "shared_experts"
    quantisation: Stated | None = None
    tables: tuple[Matrix, ...] = ()
    beside: tuple[Matrix, ...] = ()
    num_drafting: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.attentions)


@dataclass(frozen=True, slots=True)
class BackboneMemory:
    """Bytes of all weights except routed experts, in memory and in the checkpoint's files, and of
    the attention cache for one token. In memory every weight has the model's own dtype, unless it
    is kept in few bits. Of the files, `tables_nbytes` are tables that are read by row, and
    `drafting_nbytes` layers that predict further tokens, with their experts; neither is in
    memory."""

    weights_nbytes: int
    stored_nbytes: int
    cache_nbytes: int
    tables_nbytes: int = 0
    drafting_nbytes: int = 0

    def as_stored(self) -> "BackboneMemory":
        """Return the needs of an engine that keeps weights in memory as the files have them."""
        beside = self.stored_nbytes - self.tables_nbytes - self.drafting_nbytes
        return replace(self, weights_nbytes=beside)


_DRAFTING = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")

# By name: all layers, and the intermediate size of those without experts, where there are any.
_LAYERS = {
    "deepseek-v2-lite": (27, 10944),
    "deepseek-v2": (60, 12288),
    "deepseek-v3": (61, 18432),
}
_QUANTISED = {
    "deepseek-v3": {"quant_method": "fp8"},
    "qwen3-235b-a22b-fp8": {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]},
    "qwen3-235b-a22b-gptq-int4": {"quant_method": "gptq", "bits": 4, "group_size": 128},
}


def backbone_of(name: str) -> Backbone:
    """Return the backbone of a model from the table of shapes, a config.json or the folder that
    holds it; an existing path wins."""
    path = Path(name)
    if path.exists():
        return from_config(path / "config.json" if path.is_dir() else path)
    name = name.lower()
    if name in CONFIGS:
        return _backbone(CONFIGS[name], path, None)
    num_layers, dense = _LAYERS.get(name, (MODELS[name].shape.num_layers, 0))
    quantised = {"quantization_config": _QUANTISED.get(name)}
    return Backbone(
        (ATTENTIONS[name],) * num_layers, dense, quantisation=stated_quantisation(quantised)
    )


def backbone_memory(
    model: ModelShape, backbone: Backbone, *, dense: int | None = None
) -> BackboneMemory:
    """Return the bytes that a model needs besides its routed experts, in memory with linear layers
    at `dense` bits if that is given. Raises BadInput when it has fewer layers than MoE layers."""
    if backbone.num_layers < model.shape.num_layers:
        raise BadInput(
            f"{model.name} has {backbone.num_layers} layers and {model.shape.num_layers} MoE "
            "layers: mend its config"
        )
    tables = _stored_nbytes(model, backbone, backbone.tables)
    drafting = backbone.num_drafting * _drafting_layer(model, backbone)
    plain = (model.vocabulary + model.shape.num_keys) * model.hidden * model.dtype_nbytes
    stored = plain + _stored_nbytes(model, backbone, _matrices(model, backbone))
    cache = sum(each.cache_width for each in backbone.attentions) * model.dtype_nbytes
    return BackboneMemory(
        round(_weights_nbytes(model, backbone, dense)),
        round(stored + tables + drafting),
        round(cache),
        tables,
        round(drafting),
    )


def _weights_nbytes(model: ModelShape, backbone: Backbone, dense: int | None) -> float:
    """Return the bytes in memory. Embeddings that are the head too count as a linear layer."""
    linear = [(rows, columns) for _, rows, columns in _matrices(model, backbone)]
    plain = model.shape.num_keys * model.hidden  # routers
    if backbone.is_tied:
        linear.append((model.vocabulary, model.hidden))
    else:
        plain += model.vocabulary * model.hidden
    return plain * model.dtype_nbytes + sum(
        dense_nbytes(*shape, bits=dense, dtype_nbytes=model.dtype_nbytes) for shape in linear
    )


def _stored_nbytes(model: ModelShape, backbone: Backbone, matrices: Iterable[Matrix]) -> int:
    """Return the bytes of matrices in the files."""
    return sum(
        matrix_nbytes(backbone.quantisation, *matrix, model.dtype_nbytes) for matrix in matrices
    )


def _drafting_layer(model: ModelShape, backbone: Backbone) -> float:
    """Bytes of a layer that predicts a further token: a MoE layer, and a matrix that joins the
    hidden state with the embedding of the token before."""
    hidden = model.hidden
    attention = sum(rows * columns for _, rows, columns in backbone.attentions[-1].matrices(hidden))
    beside = attention + model.shape.num_experts * hidden + 2 * hidden**2
    experts = model.shape.num_experts * model.shape.expert_nbytes
    return experts + model.shared_nbytes + beside * model.dtype_nbytes


def _matrices(model: ModelShape, backbone: Backbone) -> Iterator[Matrix]:
    """Every matrix besides routed experts, their routers and the embeddings."""
    hidden = model.hidden
    num_layers = backbone.num_layers
    shared = round(model.shared_nbytes / (3 * hidden * model.dtype_nbytes))
    dense_layers = backbone.dense_layers or range(num_layers - model.shape.num_layers)
    yield from backbone.beside
    for layer, attention in enumerate(backbone.attentions):
        for name, rows, columns in attention.matrices(hidden):
            yield f"layers.{layer}.self_attn.{name}", rows, columns
        is_dense = layer in dense_layers
        yield from gated(f"layers.{layer}.mlp", hidden, backbone.dense if is_dense else 0)
        yield from gated(f"layers.{layer}.mlp.{backbone.shared}", hidden, 0 if is_dense else shared)
    if not backbone.is_tied:
        yield "lm_head", model.vocabulary, hidden


def from_config(path: Path) -> Backbone:
    """Read the backbone from a transformers config.json. Raises BadInput."""
    return _backbone(read_config(path), path, read_quantisation(path))


def _backbone(config: Mapping, path: Path, quantisation: Stated | None) -> Backbone:
    fields = Fields(config, path)
    attentions = tuple(attentions_of(config, path))
    sparse = moe_layers(fields)
    has_both = config.get("enable_moe_block")  # dense layers count as shared experts
    drafting = (config.get(name) for name in _DRAFTING)
    return Backbone(
        attentions=attentions,
        dense=0
        if has_both
        else config.get("dense_intermediate_size") or config.get("intermediate_size") or 0,
        is_tied=bool(config.get("tie_word_embeddings")),
        dense_layers=tuple(layer for layer in range(len(attentions)) if layer not in sparse),
        shared="shared_expert"
        if config.get("shared_expert_intermediate_size")
        else "shared_experts",
        quantisation=quantisation,
        tables=tuple(row_tables(config, path)),
        beside=(*_hyper_connections(fields), *_beside(fields, len(sparse))),
        num_drafting=next((count for count in drafting if isinstance(count, int)), 0),
    )


def _beside(fields: Fields, num_sparse: int) -> Iterator[Matrix]:
    """Yield the matrices of experts in a narrower space, of projections by layer, and those that
    use the tables read by row."""
    hidden, num_layers = fields.counts("hidden_size", "num_hidden_layers")
    if width := fields.get("routed_expert_hidden_size"):
        yield "routed_expert_proj", 2 * num_sparse * width, hidden
    if width := fields.get("hidden_size_per_layer_input"):
        yield "per_layer_projections", 3 * num_layers * width, hidden
    tables = fields.config.get("ple_layer_ids")
    if isinstance(tables, list) and tables:
        width = fields.get("ple_embed_dim") or hidden
        streams = fields.get("hc_count") or 1
        yield "ple.projections", len(tables) * (streams + 1) * hidden, width


def _hyper_connections(fields: Fields) -> Iterator[Matrix]:
    """Yield their matrices: DeepSeek-V4's and GLM-5-Next's, and Qwen4-Exp's."""
    hidden, num_layers = fields.counts("hidden_size", "num_hidden_layers")
    config = fields.config
    if streams := fields.get("hc_mult"):
        rows = 2 * streams if config.get("hc_magnitude") else (2 + streams) * streams
        yield "hc.fn", 2 * num_layers * rows, streams * hidden
        if not config.get("index_kpool"):  # GLM-5-Next has no head of its own
            yield "hc_head.hc_fn", streams, streams * hidden
    if streams := fields.get("hc_count"):
        count = 2 * num_layers
        rows = 2 * (count + 1) * fields.count("hc_lowrank")
        yield "hyper_connection.input_mix", rows, streams * hidden
        yield "hyper_connection.block_inject", count * streams, streams * hidden
