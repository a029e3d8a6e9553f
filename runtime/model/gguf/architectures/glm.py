"""Architectures of GLM-4.5 and later."""

from runtime.model.gguf.architectures.deepseek import (
    INDEXED,
    INDEXED_NAMES,
    LATENT_RULES,
    REQUIRED,
    STREAMS,
    STREAMS_NAMES,
    by_layer,
    clamped,
    latent,
)
from runtime.model.gguf.architectures.kimi import KDA, KDA_NAMES, KDA_RULES, linear_layers
from runtime.model.gguf.layout import (
    GROUPED,
    GROUPED_NAMES,
    SIGMOID,
    Architecture,
    Entries,
    Rule,
    Tensors,
)


def _glm4_moe(own: Entries, tensors: Tensors) -> dict[str, object]:
    return {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
    }


_GLM_5_2 = 1 << 20  # tokens of its context, by which files without types of indexers tell it


def _glm_dsa(own: Entries, tensors: Tensors) -> dict[str, object]:
    """Return the sizes of heads, and the types of layers. Indexers of which the file says nothing
    are GLM-5's and 5.1's, which choose in every layer, or GLM-5.2's, where three layers of four
    take over what the one before them chose (llama.cpp's glm-dsa.cpp)."""
    period = 4 if own["context_length"] >= _GLM_5_2 else 1
    chooses = [max(layer - 2, 0) % period == 0 for layer in range(own["block_count"])]
    return latent(own, tensors) | by_layer({"attention.indexer.types": chooses} | own, tensors)


def _glm5_next(own: Entries, tensors: Tensors) -> dict[str, object]:
    return (
        linear_layers(own, "indexed_attention")
        | latent(own, tensors)
        | by_layer(own, tensors)
        | clamped(own, tensors)
    )


ARCHITECTURES = {
    "glm5-next": Architecture(
        "glm5_next",
        INDEXED
        | STREAMS
        | KDA
        | {
            "attention.indexer.kpool": "index_kpool",
            "attention.indexer.kpool_select_tail": "index_kpool_always_select_tail",
            "kda.gate_lower_bound": "linear_lower_bound",
        },
        (
            (r"^blk\.", "model.language_model.layers."),
            (r"^token_embd\.", "model.language_model.embed_tokens."),
            (r"^output_norm\.", "model.language_model.norm."),
            (
                r"\.indexer_compressor_(\w+)\.weight",
                r".self_attn.indexer.index_kpool_compress_\1",
            ),
            *KDA_NAMES,
            *STREAMS_NAMES,
            *INDEXED_NAMES,
        ),
        (
            *LATENT_RULES,
            *KDA_RULES,
            Rule((r"\.ssm_a$",), ".self_attn.forget_gate.A_log", ("log_negate", "cast")),
        ),
        fixed={"linear_lower_bound": None},
        counted=_glm5_next,
        required=(*REQUIRED, "swiglu_clamp_exp"),
        gating=SIGMOID,
        is_latent=True,
        text_family="glm5_next_text",
    ),
    "glm-dsa": Architecture(
        "glm_moe_dsa",
        INDEXED,
        INDEXED_NAMES,
        LATENT_RULES,
        counted=_glm_dsa,
        required=(*REQUIRED, "context_length"),
        gating=SIGMOID,
        is_latent=True,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        GROUPED,
        GROUPED_NAMES,
        counted=_glm4_moe,
        gating=SIGMOID,
        is_partly_turned=True,
    ),
}
