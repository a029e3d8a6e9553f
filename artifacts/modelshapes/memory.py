"""What a model needs in the fast tier besides its routed experts: all other weights, and the attention cache.

Computed from the fields of a published config alone. Biases and norms, a few thousandths of it, are not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from artifacts.errors import BadInput
from artifacts.modelshapes.known import MODELS, ModelShape, read_config

_EMBEDDED_NBYTES = 2  # embeddings and the cache stay in 16 bits where the weights have fewer


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
    """A model without its routed experts. `dense`: intermediate size of the layers that have no experts."""

    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dense: int = 0
    latent: Latent | None = None
    is_tied: bool = False


@dataclass(frozen=True, slots=True)
class BackboneMemory:
    """Bytes of all weights except routed experts, and of the attention cache for one token."""

    weights_nbytes: int
    cache_nbytes: int


_MXFP4_NBYTES = MODELS["gpt-oss-20b"].weight_nbytes
_DEEPSEEK = Latent(512, 64, 128, 128, 1536)
_BACKBONES = {
    "mixtral-8x7b": Backbone(32, 32, 8, 128),
    "mixtral-8x22b": Backbone(56, 48, 8, 128),
    "olmoe-1b-7b": Backbone(16, 16, 16, 128),
    "qwen1.5-moe-a2.7b": Backbone(24, 16, 16, 128),
    "qwen2-57b-a14b": Backbone(28, 28, 4, 128),
    "deepseek-v2-lite": Backbone(27, 16, 16, 128, 10944, Latent(512, 64, 128, 128, None)),
    "deepseek-v2": Backbone(60, 128, 128, 128, 12288, _DEEPSEEK),
    "deepseek-v3": Backbone(61, 128, 128, 128, 18432, _DEEPSEEK),
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


def backbone_memory(model: ModelShape, backbone: Backbone) -> BackboneMemory:
    """Return the bytes that a model needs besides its routed experts. Raises BadInput when it has fewer layers than MoE
    layers."""
    shape, hidden = model.shape, model.hidden
    if backbone.num_layers < shape.num_layers:
        raise BadInput(
            f"{model.name} has {backbone.num_layers} layers and {shape.num_layers} MoE layers: mend its config"
        )
    weight_nbytes = max(1.0, model.weight_nbytes) if model.weight_nbytes != _MXFP4_NBYTES else _EMBEDDED_NBYTES
    embeddings = model.vocabulary * hidden * (1 if backbone.is_tied else 2)
    dense = (backbone.num_layers - shape.num_layers) * 3 * hidden * backbone.dense
    routers = shape.num_layers * shape.num_experts * hidden
    attention = backbone.num_layers * _attention_weights(backbone, hidden)
    inner = (dense + attention) * weight_nbytes + (embeddings + routers) * max(weight_nbytes, _EMBEDDED_NBYTES)
    latent = backbone.latent
    width = latent.kv_rank + latent.rope if latent else 2 * backbone.kv_heads * backbone.head_dim
    cached = backbone.num_layers * width * max(_EMBEDDED_NBYTES, weight_nbytes)
    return BackboneMemory(round(inner) + shape.num_layers * model.shared_nbytes, round(cached))


def _attention_weights(backbone: Backbone, hidden: int) -> int:
    """Weights of the attention of one layer."""
    latent = backbone.latent
    if latent is None:
        return hidden * backbone.head_dim * 2 * (backbone.heads + backbone.kv_heads)
    query = backbone.heads * (latent.nope + latent.rope)
    query_weights = hidden * query if latent.q_rank is None else latent.q_rank * (hidden + query)
    key_value = hidden * (latent.kv_rank + latent.rope) + latent.kv_rank * backbone.heads * (latent.nope + latent.value)
    return query_weights + key_value + backbone.heads * latent.value * hidden


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
    return Backbone(
        num_layers=_number(config, path, "num_hidden_layers"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or _number(config, path, "hidden_size") // heads,
        dense=config.get("intermediate_size") or 0,
        latent=latent or None,
        is_tied=bool(config.get("tie_word_embeddings")),
    )


def _number(config: Mapping, path: Path, name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise BadInput(f"{path} has no {name}: what the model needs besides its experts cannot be told")
    return value
