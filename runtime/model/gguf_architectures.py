"""The architectures of GGUF files that are read, in the terms of transformers: their family, config fields and names of
tensors, as the package `gguf` (constants.py) and llama.cpp's convert_hf_to_gguf.py write them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from artifacts.errors import BadInput

SOFTMAX, SIGMOID = 1, 2  # how routers' scores are made (`expert_gating_func`)

_FIELDS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "expert_used_count": "num_experts_per_tok",
    "feed_forward_length": "intermediate_size",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_NAMES = (
    (r"^output_norm\.", "model.norm."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.attn_q_norm\.", ".self_attn.q_norm."),
    (r"\.attn_k_norm\.", ".self_attn.k_norm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.post_attention_norm\.", ".post_attention_layernorm."),
    (r"\.ffn_gate_inp\.", ".mlp.gate."),
    (r"\.ffn_down_exps\.weight", ".mlp.experts.down_proj"),
    (r"\.ffn_gate_up_exps\.weight", ".mlp.experts.gate_up_proj"),
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """`own_fields` are config fields by the file's entries, and `own_names` names of tensors, besides those that are
    alike; `fixed` has fields of which files say nothing. `is_permuted` says that the rows of q and k are stored in
    pairs of a head's halves, as llama.cpp turns them; `is_partly_turned` that only some of a head's numbers are turned
    by their position."""

    family: str
    own_fields: Mapping[str, str]
    own_names: tuple[tuple[str, str], ...] = ()
    fixed: Mapping[str, object] = field(default_factory=dict)
    gating: int = SOFTMAX
    is_permuted: bool = False
    is_partly_turned: bool = False

    @property
    def fields(self) -> Mapping[str, str]:
        return _FIELDS | self.own_fields

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        return (*_NAMES, *self.own_names)


def _shared(module: str) -> tuple[tuple[str, str], ...]:
    """The names of shared experts."""
    return tuple((rf"\.ffn_{part}_shexp\.", f".mlp.{module}.{part}_proj.") for part in ("gate", "up", "down"))


_EXPERTS = {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
_LOCAL_EXPERTS = {"expert_count": "num_local_experts"}
_GROUPED = {  # DeepSeek's router without its attention
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
_GROUPED_NAMES = ((r"\.exp_probs_b\.bias", ".mlp.gate.e_score_correction_bias"), *_shared("shared_experts"))
_QWEN3 = Architecture("qwen3_moe", _EXPERTS, fixed={"norm_topk_prob": True})

ARCHITECTURES: Mapping[str, Architecture] = {
    "dots1": Architecture("dots1", _GROUPED, _GROUPED_NAMES, gating=SIGMOID),
    "glm4moe": Architecture("glm4_moe", _GROUPED, _GROUPED_NAMES, gating=SIGMOID, is_partly_turned=True),
    "llama": Architecture("mixtral", _LOCAL_EXPERTS, is_permuted=True),
    "minimax-m2": Architecture(
        "minimax_m2",
        _LOCAL_EXPERTS | {"expert_feed_forward_length": "intermediate_size"},
        ((r"\.exp_probs_b\.bias", ".mlp.e_score_correction_bias"),),
        gating=SIGMOID,
        is_partly_turned=True,
    ),
    "olmoe": Architecture("olmoe", _EXPERTS, fixed={"norm_topk_prob": False}),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        ((r"\.ffn_gate_inp_shexp\.", ".mlp.shared_expert_gate."), *_shared("shared_expert")),
    ),
    "qwen3moe": _QWEN3,
    "qwen3vlmoe": _QWEN3,  # its language model; a text's three positions are one
}
"""By the name that files give, `general.architecture`."""


def architecture_of(path: Path, entries: Mapping[str, object]) -> tuple[Architecture, dict[str, object]]:
    """Return the architecture of a file, and its own entries without their prefix. Raises BadInput for another, and for
    a model without experts."""
    name = str(entries.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise BadInput(f"{path} is a GGUF file of {name[:40]}: moectl reads {', '.join(ARCHITECTURES)}")
    if not entries.get(f"{name}.expert_count"):
        raise BadInput(f"{path} has no experts ({name}.expert_count): moectl runs Mixture-of-Experts models")
    prefix = f"{name}."
    return ARCHITECTURES[name], {key[len(prefix) :]: value for key, value in entries.items() if key.startswith(prefix)}


def check_computed(path: Path, form: Architecture, own: Mapping[str, object]) -> None:
    """Raise BadInput where a file's own entries ask for what its family does not compute."""
    if own.get("rope.scaling.type", "none") != "none":
        raise BadInput(f"{path} scales its positions (rope.scaling), which moectl does not read in GGUF files")
    if (gating := own.get("expert_gating_func", form.gating)) != form.gating:
        raise BadInput(f"{path} says expert_gating_func {gating}, and {form.family} computes {form.gating}")
    if not form.is_partly_turned and own.get("rope.dimension_count") not in (None, head_dim(own)):
        raise BadInput(f"{path} turns a part of each head (rope.dimension_count), which {form.family} does not compute")


def head_dim(own: Mapping[str, object]) -> int:
    """The size of an attention head."""
    return own.get("attention.key_length") or own["embedding_length"] // own["attention.head_count"]
