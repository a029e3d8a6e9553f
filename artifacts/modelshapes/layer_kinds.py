"""The attention of each layer by the fields of a config, where layers differ: gated delta rules,
Kimi's delta attention, attention over compressed tokens, heads that differ between windows and
whole contexts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from artifacts.modelshapes.attention import Attention, Matrix, attention_of
from artifacts.modelshapes.fields import Fields

_COMPRESSED = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


@dataclass(frozen=True, slots=True)
class Mixer:
    """What takes attention's place in a layer: its matrices, and the numbers that are cached for
    one token, on average. A state that does not grow with the context is not counted."""

    modules: tuple[Matrix, ...]
    cache_width: float = 0

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """Return the name, rows and columns of each matrix."""
        return self.modules


def attentions_of(config: Mapping, path: Path) -> list[Attention | Mixer]:
    """Return the attention of each layer of the model with the config at `path`. Raises
    BadInput."""
    fields = Fields(config, path)
    return [_attention(fields, kind, layer) for layer, kind in enumerate(_kinds(fields))]


def _kinds(fields: Fields) -> list[object]:
    """Return the kind of each layer in transformers' words, or tokens for each compressed one."""
    config = fields.config
    count = fields.count("num_hidden_layers")
    for name in ("layer_types", "compress_ratios"):
        given = config.get(name)
        if isinstance(given, list) and len(given) >= count:
            return given[:count]
    layers = range(1, count + 1)
    full = layers
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(linear.get("full_attn_layers"), list):
        full = linear["full_attn_layers"]
    elif every := fields.get("full_attention_interval"):
        full = layers[every - 1 :: every]
    return ["full_attention" if layer in full else "linear_attention" for layer in layers]


def _attention(fields: Fields, kind: object, layer: int) -> Attention | Mixer:
    config = fields.config
    if config.get("o_lora_rank"):
        return _compressed(fields, _COMPRESSED.get(kind, kind))
    has_delta_rule = bool(config.get("linear_num_value_heads"))
    if kind == "linear_attention":
        return _gated_delta(fields) if has_delta_rule else _kimi_delta(fields)
    attention = replace(
        attention_of(config | _of_layer(config, kind, layer), fields.path),
        is_gated=has_delta_rule or _is_kimi_k3(config) or config.get("model_type") == "hy_v4",
        has_values=kind != "full_attention" or not config.get("attention_k_eq_v"),
    )
    if config.get("indexer_n_heads"):
        return _indexed_by_block(fields, attention)
    is_indexed = attention.latent and _has_indexer(config, layer)
    return _indexed(fields, attention) if is_indexed else attention


def _of_layer(config: Mapping, kind: object, layer: int) -> Mapping:
    """Return the fields of the config that differ in a layer, as Gemma 4's with the whole
    context."""
    by_layer = config.get("per_layer_config")
    if isinstance(by_layer, Mapping):
        return by_layer.get(str(layer), by_layer.get(f"{layer:02}", {}))
    if kind != "full_attention" or not config.get("global_head_dim"):
        return {}
    heads = config.get("num_global_key_value_heads") or config.get("num_key_value_heads")
    return {"head_dim": config["global_head_dim"], "num_key_value_heads": heads}


def _has_indexer(config: Mapping, layer: int) -> bool:
    """Return whether a layer has the indexer of latent attention, and does not share another's."""
    kinds = config.get("indexer_types")
    is_shared = isinstance(kinds, list) and kinds[layer : layer + 1] == ["shared"]
    return bool(config.get("index_n_heads")) and not is_shared


def _indexed_by_block(fields: Fields, attention: Attention) -> Attention:
    """Return the attention with the matrix that chooses its tokens in Qwen4-Exp."""
    heads, keys, width, ratio, hidden = fields.counts(
        "indexer_n_heads",
        "indexer_kv_heads",
        "indexer_head_dim",
        "indexer_compress_ratio",
        "hidden_size",
    )
    module = ("indexer.index_qk_proj", (heads + keys) * width, hidden)
    return replace(attention, indexer=(module,), index_width=keys * width // ratio)


def _indexed(fields: Fields, attention: Attention) -> Attention:
    """Return latent attention with the matrices that choose its tokens since DeepSeek-V3.2."""
    heads, width, hidden = fields.counts("index_n_heads", "index_head_dim", "hidden_size")
    pooled = width if fields.config.get("index_kpool") else 0
    modules = (
        ("indexer.wq_b", heads * width, attention.latent.q_rank or hidden),
        ("indexer.wk", width, hidden),
        ("indexer.weights_proj", heads, hidden),
        ("indexer.index_kpool_compress_gate", pooled, hidden),
    )
    return replace(attention, indexer=modules, index_width=width)


def _gated_delta(fields: Fields) -> Mixer:
    """Return the gated delta rule of Qwen3-Next and its successors."""
    hidden, key_heads, key_width, heads, width, kernel = fields.counts(
        "hidden_size",
        "linear_num_key_heads",
        "linear_key_head_dim",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    values = heads * width
    mixed = 2 * key_heads * key_width + values
    return Mixer(
        (
            ("in_proj_qkv", mixed, hidden),
            ("in_proj_z", values, hidden),
            ("in_proj_ba", 2 * heads, hidden),
            ("conv1d", mixed, kernel),
            ("out_proj", hidden, values),
        )
    )


def _kimi_delta(fields: Fields) -> Mixer:
    """Return the delta attention of Kimi-Linear; in Kimi-K3 its gate has the full rank."""
    config = fields.config
    hidden = fields.count("hidden_size")
    own = config.get("linear_attn_config") or {
        "num_heads": config.get("linear_num_heads"),
        "head_dim": config.get("linear_head_dim"),
        "short_conv_kernel_size": config.get("linear_conv_kernel_dim"),
    }
    heads, rank, kernel = Fields(own, fields.path).counts(
        "num_heads", "head_dim", "short_conv_kernel_size"
    )
    width = heads * rank
    gate = (
        [("g_proj", width, hidden)]
        if _is_kimi_k3(config)
        else [("g_a_proj", rank, hidden), ("g_b_proj", width, rank)]
    )
    return Mixer(
        (
            *((f"{name}_proj", width, hidden) for name in "qkv"),
            ("f_a_proj", rank, hidden),
            ("f_b_proj", width, rank),
            *gate,
            ("b_proj", heads, hidden),
            ("conv1d", 3 * width, kernel),
            ("o_proj", hidden, width),
        )
    )


def _is_kimi_k3(config: Mapping) -> bool:
    return bool(config.get("routed_expert_hidden_size") and config.get("linear_attn_config"))


def _compressed(fields: Fields, ratio: object) -> Mixer:
    """Return DeepSeek-V4's attention where `ratio` tokens are cached as one; the window of the last
    tokens is not counted."""
    hidden, heads, width, rank, groups, out = fields.counts(
        "hidden_size",
        "num_attention_heads",
        "head_dim",
        "q_lora_rank",
        "o_groups",
        "o_lora_rank",
    )
    modules = (
        ("q_a_proj", rank, hidden),
        ("q_b_proj", heads * width, rank),
        ("kv_proj", width, hidden),
        ("o_a_proj", groups * out, heads * width // groups),
        ("o_b_proj", hidden, groups * out),
    )
    if not isinstance(ratio, int) or ratio < 1:
        return Mixer(modules)
    compressing = _compressing(fields, ratio)
    return Mixer(modules + compressing.modules, compressing.cache_width)


def _compressing(fields: Fields, ratio: int) -> Mixer:
    """Return what compresses the tokens there. Those of a small ratio overlap, and an indexer
    chooses among them."""
    hidden, width = fields.counts("hidden_size", "head_dim")
    if ratio >= _COMPRESSED["heavily_compressed_attention"]:
        return Mixer(_compressor("compressor", width, hidden, ratio), width / ratio)
    heads, index, rank = fields.counts("index_n_heads", "index_head_dim", "q_lora_rank")
    modules = (
        *_compressor("compressor", 2 * width, hidden, ratio),
        *_compressor("compressor.indexer", 2 * index, hidden, ratio),
        ("compressor.indexer.q_b_proj", heads * index, rank),
        ("compressor.indexer.scorer.weights_proj", heads, hidden),
    )
    return Mixer(modules, (width + index) / ratio)


def _compressor(name: str, width: int, hidden: int, ratio: int) -> tuple[Matrix, ...]:
    return (
        (f"{name}.kv_proj", width, hidden),
        (f"{name}.gate_proj", width, hidden),
        (f"{name}.position_bias", ratio, width),
    )
