"""What a model needs in the fast tier besides its routed experts: all other weights, and the attention cache.

Computed from the fields of a published config alone. Biases and norms, a few thousandths of it, are not counted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from artifacts.errors import BadInput
from artifacts.formats.dense import dense_nbytes
from artifacts.formats.stated import Stated, stated_quantisation
from artifacts.modelshapes.known import (
    Matrix,
    ModelShape,
    gated,
    matrix_nbytes,
    moe_layers,
    read_config,
    read_quantisation,
)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): the cache holds the compressed key and value, and the rotary key."""

    kv_rank: int
    rope: int
    nope: int
    value: int
    q_rank: int | None


@dataclass(frozen=True, slots=True)
class Backbone:
    """A model without its routed experts. `dense`: intermediate size of the layers that have no experts, which are the
    first ones unless `dense_layers` names them; `shared`: name of the experts that every token uses."""

    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dense: int = 0
    latent: Latent | None = None
    is_tied: bool = False
    dense_layers: tuple[int, ...] = ()
    shared: str = "shared_experts"
    quantisation: Stated | None = None


@dataclass(frozen=True, slots=True)
class BackboneMemory:
    """Bytes of all weights except routed experts, in memory and in the checkpoint's files, and of the attention cache
    for one token. In memory every weight has the model's own dtype, unless it is kept in few bits."""

    weights_nbytes: int
    stored_nbytes: int
    cache_nbytes: int


def _published(quantization: Mapping) -> Stated | None:
    return stated_quantisation({"quantization_config": quantization})


_DEEPSEEK = Latent(512, 64, 128, 128, 1536)
_BACKBONES = {
    "mixtral-8x7b": Backbone(32, 32, 8, 128),
    "mixtral-8x22b": Backbone(56, 48, 8, 128),
    "olmoe-1b-7b": Backbone(16, 16, 16, 128),
    "qwen1.5-moe-a2.7b": Backbone(24, 16, 16, 128),
    "qwen2-57b-a14b": Backbone(28, 28, 4, 128),
    "deepseek-v2-lite": Backbone(27, 16, 16, 128, 10944, Latent(512, 64, 128, 128, None)),
    "deepseek-v2": Backbone(60, 128, 128, 128, 12288, _DEEPSEEK),
    "deepseek-v3": Backbone(61, 128, 128, 128, 18432, _DEEPSEEK, quantisation=_published({"quant_method": "fp8"})),
    "qwen3-30b-a3b": Backbone(48, 32, 4, 128),
    "qwen3-235b-a22b": Backbone(94, 64, 4, 128),
    "phi-3.5-moe": Backbone(32, 32, 8, 128),
    "gpt-oss-20b": Backbone(24, 64, 8, 64),
    "gpt-oss-120b": Backbone(36, 64, 8, 64),
}


def backbone_of(name: str) -> Backbone:
    """Return the backbone of a model from the table of shapes, a config.json or the folder that holds it; an existing
    path wins."""
    path = Path(name)
    if not path.exists():
        return _BACKBONES[name]
    return from_config(path / "config.json" if path.is_dir() else path)


def backbone_memory(model: ModelShape, backbone: Backbone, *, dense: int | None = None) -> BackboneMemory:
    """Return the bytes that a model needs besides its routed experts, in memory with linear layers at `dense` bits if
    that is given. Raises BadInput when it has fewer layers than MoE layers."""
    shape, hidden = model.shape, model.hidden
    if backbone.num_layers < shape.num_layers:
        raise BadInput(
            f"{model.name} has {backbone.num_layers} layers and {shape.num_layers} MoE layers: mend its config"
        )
    embeddings = model.vocabulary * hidden
    routers = shape.num_layers * shape.num_experts * hidden
    matrices = list(_matrices(model, backbone))
    shapes = [(rows, columns) for _, rows, columns in matrices]
    packed = [*shapes, (model.vocabulary, hidden)] if backbone.is_tied else shapes
    plain = routers if backbone.is_tied else routers + embeddings
    memory = plain * model.dtype_nbytes
    memory += sum(dense_nbytes(*shape, bits=dense, dtype_nbytes=model.dtype_nbytes) for shape in packed)
    stored = (embeddings + routers) * model.dtype_nbytes
    stored += sum(matrix_nbytes(backbone.quantisation, *matrix, model.dtype_nbytes) for matrix in matrices)
    latent = backbone.latent
    width = latent.kv_rank + latent.rope if latent else 2 * backbone.kv_heads * backbone.head_dim
    return BackboneMemory(round(memory), round(stored), round(backbone.num_layers * width * model.dtype_nbytes))


def _matrices(model: ModelShape, backbone: Backbone) -> Iterator[Matrix]:
    """Every matrix besides routed experts, their routers and the embeddings."""
    hidden, num_layers = model.hidden, backbone.num_layers
    shared = round(model.shared_nbytes / (3 * hidden * model.dtype_nbytes))
    dense_layers = backbone.dense_layers or range(num_layers - model.shape.num_layers)
    for layer in range(num_layers):
        for name, rows, columns in _attention(backbone, hidden):
            yield f"layers.{layer}.self_attn.{name}", rows, columns
        is_dense = layer in dense_layers
        yield from gated(f"layers.{layer}.mlp", hidden, backbone.dense if is_dense else 0)
        yield from gated(f"layers.{layer}.mlp.{backbone.shared}", hidden, 0 if is_dense else shared)
    if not backbone.is_tied:
        yield "lm_head", model.vocabulary, hidden


def _attention(backbone: Backbone, hidden: int) -> Iterator[Matrix]:
    """The matrices of the attention of one layer."""
    latent, heads = backbone.latent, backbone.heads
    if latent is None:
        for name, count in (("q_proj", heads), ("k_proj", backbone.kv_heads), ("v_proj", backbone.kv_heads)):
            yield name, count * backbone.head_dim, hidden
        yield "o_proj", hidden, heads * backbone.head_dim
        return
    query = heads * (latent.nope + latent.rope)
    if latent.q_rank is None:
        yield "q_proj", query, hidden
    else:
        yield "q_a_proj", latent.q_rank, hidden
        yield "q_b_proj", query, latent.q_rank
    yield "kv_a_proj_with_mqa", latent.kv_rank + latent.rope, hidden
    yield "kv_b_proj", heads * (latent.nope + latent.value), latent.kv_rank
    yield "o_proj", hidden, heads * latent.value


def from_config(path: Path) -> Backbone:
    """Read the backbone from a transformers config.json. Raises BadInput."""
    config = read_config(path)
    heads = _number(config, path, "num_attention_heads")
    rank = config.get("kv_lora_rank")
    latent = rank and Latent(
        rank,
        *(_number(config, path, name) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")),
        q_rank=config.get("q_lora_rank"),
    )
    num_layers, sparse = _number(config, path, "num_hidden_layers"), moe_layers(config, path)
    return Backbone(
        num_layers=num_layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or _number(config, path, "hidden_size") // heads,
        dense=config.get("intermediate_size") or 0,
        latent=latent or None,
        is_tied=bool(config.get("tie_word_embeddings")),
        dense_layers=tuple(layer for layer in range(num_layers) if layer not in sparse),
        shared="shared_expert" if config.get("shared_expert_intermediate_size") else "shared_experts",
        quantisation=read_quantisation(path),
    )


def _number(config: Mapping, path: Path, name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise BadInput(f"{path} has no {name}: what the model needs besides its experts cannot be told")
    return value
