"""Description of an architecture of GGUF files, by its differences from others, in the terms of
transformers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from artifacts.formats.gguf.gguf_header import GgufTensor

# how routers' scores are made (`expert_gating_func`)
SOFTMAX = 1
SIGMOID = 2
SOFTMAX_OF_CHOSEN = 3
SQRT_SOFTPLUS = 4

_FIELDS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
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
)
EXPERTS = {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
LOCAL_EXPERTS = {
    "expert_count": "num_local_experts",
    "expert_feed_forward_length": "intermediate_size",
}
GROUPED = {  # DeepSeek's router without its attention
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
Entries = Mapping[str, object]
"""Entries of a file, without the prefix of its architecture."""
Tensors = Mapping[str, GgufTensor]
"""Tensors of a file, by name."""


def head_dim(own: Entries) -> int:
    """Return the size of a head, where attention is not latent."""
    return own.get("attention.key_length") or own["embedding_length"] // own["attention.head_count"]


def num_layers(own: Entries) -> int:
    """Return the number of layers, without those that predict further tokens."""
    return own["block_count"] - own.get("nextn_predict_layers", 0)


def kinds_of_attention(own: Entries) -> list[str]:
    """Return the types of layers, by the pattern of those that see a window."""
    pattern = own["attention.sliding_window_pattern"][: num_layers(own)]
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern]


def kinds_of_mlp(own: Entries, tensors: Tensors) -> list[str]:
    """Return whether layers have experts (`sparse`) or not (`dense`), by their routers."""
    return [
        "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in tensors else "dense"
        for layer in range(num_layers(own))
    ]


def shared(module: str) -> tuple[tuple[str, str], ...]:
    """Return the patterns of the names of shared experts' tensors, with their names in `module`."""
    return tuple(
        (rf"\.ffn_{part}_shexp\.", f".mlp.{module}.{part}_proj.") for part in ("gate", "up", "down")
    )


GROUPED_NAMES = (
    (r"\.exp_probs_b\.bias", ".mlp.gate.e_score_correction_bias"),
    *shared("shared_experts"),
)


class Rule(NamedTuple):
    """A parameter that is computed: the patterns of its tensors in a file, the end of its name, and
    the names of operations in their order (`mapping.OPERATIONS`)."""

    sources: tuple[str, ...]
    target: str
    operations: tuple[str, ...]


def from_zero(*names: str) -> tuple[Rule, ...]:
    """Return the rules for norms that multiply by one more than their weights."""
    return tuple(
        Rule((f"{name}.weight",), f"{name}.weight", ("subtract_one", "cast")) for name in names
    )


def shared_gate_up(target: str) -> Rule:
    """Return the rule for the parameter that holds both gate and up of shared experts."""
    sources = r"\.ffn_gate_shexp\.weight", r"\.ffn_up_shexp\.weight"
    return Rule(sources, target, ("concatenate",))


PERMUTED = (
    Rule(("self_attn.q_proj.weight",), "self_attn.q_proj.weight", ("permute_queries",)),
    Rule(("self_attn.k_proj.weight",), "self_attn.k_proj.weight", ("permute_keys",)),
)
"""The rules for rows of q and k that llama.cpp takes by turns from both halves of a head."""


def _nothing(own: Entries, tensors: Tensors) -> dict[str, object]:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of GGUF files: how its entries and tensors become those of transformers.

    `own_fields` are config fields by the file's entries, and `own_names` names of tensors, tried
    before the names that all architectures share; `own_rules` are for parameters that are computed.
    `experts` is the path of a layer's experts, and `gate_up` has the operations that make one
    parameter of their gates and ups, none where experts have no gate. `fixed` and `fixed_scaling`
    are fields of the config, and of its scaling of positions, that files lack or may lack.
    `counted` computes fields from several entries, or from the names of tensors.

    Files without the entries `required` are refused, and so are files with values other than
    `usual`. If scores are sigmoids, the family is `of_sigmoid`, if there is one.

    `is_partly_turned`: only some of a head's numbers are turned by their position. `is_latent`:
    attention is multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). `rules_of`:
    transformers has rules for the tensors of the architecture of this name, which come first.
    `text_family`: the family is multimodal, and this is the part that files describe.
    """

    family: str
    own_fields: Mapping[str, str]
    own_names: tuple[tuple[str, str], ...] = ()
    own_rules: tuple[Rule, ...] = ()
    fixed: Mapping[str, object] = field(default_factory=dict)
    fixed_scaling: Mapping[str, object] = field(default_factory=dict)
    counted: Callable[[Entries, Tensors], dict[str, object]] = _nothing
    required: tuple[str, ...] = ()
    usual: Mapping[str, object] = field(default_factory=dict)
    gating: int = SOFTMAX
    of_sigmoid: str | None = None
    experts: str = "mlp.experts"
    gate_up: tuple[str, ...] = ("concatenate_each",)
    is_partly_turned: bool = False
    is_latent: bool = False
    rules_of: str | None = None
    text_family: str | None = None

    @property
    def families(self) -> tuple[str, ...]:
        return (self.family,) if self.of_sigmoid is None else (self.family, self.of_sigmoid)

    @property
    def fields(self) -> Mapping[str, str]:
        return _FIELDS | self.own_fields

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        experts = (
            (r"\.ffn_down_exps\.weight", f".{self.experts}.down_proj"),
            (r"\.ffn_gate_up_exps\.weight", f".{self.experts}.gate_up_proj"),
        )
        own = dict(self.own_names)
        return (*self.own_names, *(pair for pair in _NAMES if pair[0] not in own), *experts)

    @property
    def rules(self) -> tuple[Rule, ...]:
        gate_up = (
            Rule(
                (rf"\.ffn_gate_exps\.{kind}", rf"\.ffn_up_exps\.{kind}"),
                f".{self.experts}.gate_up_proj{ending}",
                self.gate_up,
            )
            for kind, ending in (("weight", ""), ("bias", "_bias"))
            if self.gate_up
        )
        return (*self.own_rules, *gate_up)

    def of(self, own: Entries) -> "Architecture":
        """Return this architecture for files with these entries. Names may have `{ngrams}` for the
        module with the table of n-grams, which one layer has."""
        for layer in own.get("ple.layers", ()):
            module = f"model.layers.{layer}.ple.ple_embedding"
            names = [(old, new.replace("{ngrams}", module)) for old, new in self.own_names]
            return replace(self, own_names=tuple(names))
        if self.of_sigmoid and own.get("expert_gating_func") == SIGMOID:
            return replace(self, family=self.of_sigmoid, gating=SIGMOID)
        return self
