"""The attention of each layer by the fields of a config, where layers differ: gated delta rules,
Kimi's delta attention, attention over compressed tokens, heads that differ between windows and
whole contexts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from artifacts.modelshapes.attention import Attention, Matrix, attention_of, needed

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
    return [
        _attention(config, path, kind, layer) for layer, kind in enumerate(_kinds(config, path))
    ]


def _kinds(config: Mapping, path: Path) -> list[object]:
    """Return the kind of each layer in transformers' words, or tokens for each compressed one."""
    count = needed(config, path, "num_hidden_layers")
    for name in ("layer_types", "compress_ratios"):
        given = config.get(name)
        if isinstance(given, list) and len(given) >= count:
            return given[:count]
    kinds: list[object] = ["full_attention"] * count
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(linear.get("full_attn_layers"), list):
        full = set(linear["full_attn_layers"])  # counted from 1
        return [
            kind if layer + 1 in full else "linear_attention" for layer, kind in enumerate(kinds)
        ]
    if config.get("full_attention_interval"):
        every = needed(config, path, "full_attention_interval")
        return [
            "linear_attention" if (layer + 1) % every else kind for layer, kind in enumerate(kinds)
        ]
    return kinds


def _attention(config: Mapping, path: Path, kind: object, layer: int) -> Attention | Mixer:
    if config.get("o_lora_rank"):
        return _compressed(config, path, _COMPRESSED.get(kind, kind))
    if kind == "linear_attention":
        return (
            _gated_delta(config, path)
            if config.get("linear_num_value_heads")
            else _kimi_delta(config, path)
        )
    attention = attention_of(config | _of_layer(config, kind, layer), path)
    is_gated = bool(config.get("linear_num_value_heads")) or _is_kimi_k3(config)
    has_values = kind != "full_attention" or not config.get("attention_k_eq_v")
    attention = replace(
        attention,
        is_gated=is_gated or config.get("model_type") == "hy_v4",
        has_values=has_values,
    )
    return _indexed(config, path, attention, layer)


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


def _indexed(config: Mapping, path: Path, attention: Attention, layer: int) -> Attention:
    """Return the attention with the matrices that choose its tokens: of DeepSeek-V3.2's kind, or
    of Qwen4-Exp's."""
    hidden = needed(config, path, "hidden_size")
    if config.get("indexer_n_heads"):
        heads, keys, width, ratio = (
            needed(config, path, f"indexer_{name}")
            for name in ("n_heads", "kv_heads", "head_dim", "compress_ratio")
        )
        module = ("indexer.index_qk_proj", (heads + keys) * width, hidden)
        return replace(attention, indexer=(module,), index_width=keys * width // ratio)
    kinds = config.get("indexer_types")
    is_shared = isinstance(kinds, list) and layer < len(kinds) and kinds[layer] == "shared"
    latent = attention.latent
    if not latent or not config.get("index_n_heads") or is_shared:
        return attention
    heads, width = (needed(config, path, name) for name in ("index_n_heads", "index_head_dim"))
    modules = (
        ("indexer.wq_b", heads * width, latent.q_rank or hidden),
        ("indexer.wk", width, hidden),
        ("indexer.weights_proj", heads, hidden),
        ("indexer.index_kpool_compress_gate", width if config.get("index_kpool") else 0, hidden),
    )
    return replace(attention, indexer=modules, index_width=width)


def _gated_delta(config: Mapping, path: Path) -> Mixer:
    """Return the gated delta rule of Qwen3-Next and its successors."""
    hidden = needed(config, path, "hidden_size")
    keys, values = (
        needed(config, path, f"linear_num_{kind}_heads")
        * needed(config, path, f"linear_{kind}_head_dim")
        for kind in ("key", "value")
    )
    heads = needed(config, path, "linear_num_value_heads")
    mixed = 2 * keys + values
    return Mixer(
        (
            ("in_proj_qkv", mixed, hidden),
            ("in_proj_z", values, hidden),
            ("in_proj_ba", 2 * heads, hidden),
            ("conv1d", mixed, needed(config, path, "linear_conv_kernel_dim")),
            ("out_proj", hidden, values),
        )
    )


def _kimi_delta(config: Mapping, path: Path) -> Mixer:
    """Return the delta attention of Kimi-Linear; in Kimi-K3 its gate has the full rank."""
    hidden = needed(config, path, "hidden_size")
    own = config.get("linear_attn_config") or {
        "num_heads": config.get("linear_num_heads"),
        "head_dim": config.get("linear_head_dim"),
        "short_conv_kernel_size": config.get("linear_conv_kernel_dim"),
    }
    heads, rank, kernel = (
        needed(own, path, name) for name in ("num_heads", "head_dim", "short_conv_kernel_size")
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


def _compressed(config: Mapping, path: Path, ratio: object) -> Mixer:
    """Return DeepSeek-V4's attention where `ratio` tokens are cached as one; the window of the last
    tokens is not counted. Those of a small ratio overlap, and an indexer chooses among them."""
    hidden, heads, width, rank, groups, out = (
        needed(config, path, name)
        for name in (
            "hidden_size",
            "num_attention_heads",
            "head_dim",
            "q_lora_rank",
            "o_groups",
            "o_lora_rank",
        )
    )
    modules = [
        ("q_a_proj", rank, hidden),
        ("q_b_proj", heads * width, rank),
        ("kv_proj", width, hidden),
        ("o_a_proj", groups * out, heads * width // groups),
        ("o_b_proj", hidden, groups * out),
    ]
    if not isinstance(ratio, int) or ratio < 1:
        return Mixer(tuple(modules))
    is_chosen = ratio < _COMPRESSED["heavily_compressed_attention"]
    modules += _compressor("compressor", width * (1 + is_chosen), hidden, ratio)
    if not is_chosen:
        return Mixer(tuple(modules), width / ratio)
    count, index = (needed(config, path, name) for name in ("index_n_heads", "index_head_dim"))
    modules += _compressor("compressor.indexer", 2 * index, hidden, ratio)
    modules += [
        ("compressor.indexer.q_b_proj", count * index, rank),
        ("compressor.indexer.scorer.weights_proj", count, hidden),
    ]
    return Mixer(tuple(modules), (width + index) / ratio)


def _compressor(name: str, width: int, hidden: int, ratio: int) -> list[Matrix]:
    return [
        (f"{name}.kv_proj", width, hidden),
        (f"{name}.gate_proj", width, hidden),
        (f"{name}.position_bias", ratio, width),
    ]
