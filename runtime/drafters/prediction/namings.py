"""Names that families give the tensors of a layer which predicts a further token.

Read in the checkpoints' indexes and in other engines: vLLM's deepseek_mtp.py, qwen3_next_mtp.py,
mimo_mtp.py and ernie_mtp.py (vllm/model_executor/models), SGLang's qwen4_exp_mtp.py
(python/sglang/srt/models), transformers' `MtpModel`, and for GGUF files gguf-py's `nextn`
tensors.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Naming:
    """Names without `.weight`, behind a `stem`, a pattern in which `{depth}` is the number of the
    model's layers. Tensors of the decoder layer begin with `block`, and are the model's `layer` 0.

    `project` has one matrix [H, 2H] over token and hidden state side by side, or one [H, H] for
    each of the two where a layer hands on several streams. `ends` has the prefixes of modules
    behind the layer by those of the model's. The model's own serve where that is empty.
    `fields` are the layer's in the config, where no layer of the model is like it.
    """

    stem: str
    embed_norm: str
    hidden_norm: str
    project: tuple[str, ...]
    ends: Mapping[str, str] = field(default_factory=dict)
    block: str = ""
    layer: str = "layers.0."
    is_hidden_first: bool = False
    fields: Mapping[str, object] = field(default_factory=dict)

    def stem_in(self, names: Iterable[str], depth: int) -> str | None:
        """Return the stem that the names of a checkpoint have; None if it has no such layer."""
        pattern = re.compile(
            f"({self.stem.format(depth=depth)}){re.escape(self.project[0])}\\.weight"
        )
        found = (pattern.fullmatch(name) for name in names)
        return next((one.group(1) for one in found if one), None)


SHARED = ("embed_tokens.", "shared_head.head.", "nextn.embed_tokens.", "nextn.shared_head_head.")
"""Prefixes of tensors that are copies of the model's embedding and head (DeepSeek-V3, section 2.2,
https://arxiv.org/abs/2412.19437): the model's own serve."""

_STREAMS = {"layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}

NAMINGS: Mapping[str, Naming] = {
    "nextn": Naming(
        r"(?:.*\.)?layers\.{depth}\.",
        "enorm",
        "hnorm",
        ("eh_proj",),
        {"shared_head.norm.": "norm.", "final_layernorm.": "norm."},
    ),
    "mtp.fc": Naming(
        r"mtp\.",
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        ("fc",),
        {"norm.": "norm."},
        block="layers.0.",
    ),
    "mtp_layers": Naming(
        r"model\.mtp_layers\.0\.",
        "token_layernorm",
        "hidden_layernorm",
        ("input_proj",),
        {"final_layernorm.": "norm."},
        is_hidden_first=True,
    ),
    "mtp.layers": Naming(
        r"model\.mtp\.layers\.0\.",
        "enorm",
        "hnorm",
        ("eh_proj",),
        {"final_layernorm.": "norm."},
        fields={"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
    ),
    "mtp_block": Naming(
        r"model\.",
        "mtp_emb_norm.0",
        "mtp_hidden_norm.0",
        ("mtp_linear_proj.0",),
        block="mtp_block.0.",
    ),
    "mtp.fc_hidden": Naming(
        r"mtp\.",
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        ("fc_embedding", "fc_hidden"),
        {"hyper_connection_mixer.": "hyper_connection_mixer."},
        block="layers.0.",
    ),
    "mtp.h_proj": Naming(
        r"mtp\.0\.",
        "enorm",
        "hnorm",
        ("e_proj", "h_proj"),
        {"norm.": "norm.", "hc_head_": "hc_head.hc_"},
        fields=_STREAMS,
    ),
    "blk.nextn": Naming(
        r"blk\.{depth}\.",
        "nextn.enorm",
        "nextn.hnorm",
        ("nextn.eh_proj",),
        {"nextn.shared_head_norm.": "output_norm."},
        layer="blk.0.",
    ),
}
"""By the name that a receipt tells."""
