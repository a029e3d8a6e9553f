"""Writes the small GGUF files of tests/data/gguf: random models of transformers, converted by
llama.cpp's own convert_hf_to_gguf.py, which no test needs afterwards.

    python -m tools.make.converted tests/data/gguf --converter llama.cpp            all of them
    python -m tools.make.converted tests/data/gguf --converter llama.cpp gpt-oss    some

The converter's folder is in the source distribution llama-cpp-python 0.3.36, `vendor/llama.cpp`.
Files are compressed by xz. Their numbers are drawn anew from names and shapes, so that tests have
the same model in transformers.
"""

import json
import lzma
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import NamedTuple
from zlib import crc32

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tools.arguments import parser_of
from tools.make.families import tiny

TOKENS = ["<pad>", "<bos>", "<eos>", *bytes_to_unicode().values(), "th"]
_SIZES = {
    "head_dim": 16,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "vocab_size": len(TOKENS),
    "vocab_size_per_layer_input": len(TOKENS),
}
_IN_SECTIONS = {
    "mrope_section": [1, 1, 0],
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e4,
    "rope_type": "default",
}


_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_type": "yarn",
}
_INDEXED = {  # many heads, or scores of several tokens are 0 and it is open which are chosen
    "first_k_dense_replace": 1,
    "hidden_size": 32,
    "index_head_dim": 64,  # llama.cpp turns no smaller ones
    "index_n_heads": 8,
    "intermediate_size": 64,
    "kv_lora_rank": 32,
    "num_hidden_layers": 3,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
_KDA = {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4}


class Converted(NamedTuple):
    """A model by its family, the fields of its config that differ from those of `tiny`, the fields
    that only its publisher has, and the names of tensors that transformers does not give back, as
    patterns. `in_mxfp4`: its experts are published so."""

    family: str
    fields: Mapping[str, object] = MappingProxyType({})
    published: Mapping[str, object] = MappingProxyType({})
    names: Mapping[str, str] = MappingProxyType({})
    in_mxfp4: bool = False


CONVERTED: Mapping[str, Converted] = {
    "afmoe": Converted(
        "afmoe",
        {
            "num_dense_layers": 1,
            "num_hidden_layers": 4,
            "mup_enabled": True,
            "global_attn_every_n_layers": 4,
        },
        {"route_norm": True},
    ),
    "deepseek4": Converted(
        "deepseek_v4",
        {
            "head_dim": 32,
            "hidden_size": 32,
            "index_head_dim": 64,  # llama.cpp turns no smaller ones
            "index_n_heads": 8,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "o_groups": 2,
            "o_lora_rank": 16,
            "partial_rotary_factor": 0.25,
            "q_lora_rank": 32,
            "rope_parameters": _YARN,
            "swiglu_limit": 1.0,
        },
        {
            "compress_ratios": [0, 4, 128, 0],  # the last is of a layer that predicts
            "num_hash_layers": 1,
            "rope_scaling": _YARN,
        },
        {
            r"^model\.": "",
            r"attn\.norm": "attn.kv_norm",
            r"embed_tokens": "embed",
            r"hc_head\.hc": "hc_head",
        },
        in_mxfp4=True,
    ),
    "deepseek32": Converted("deepseek_v32", _INDEXED, {"scoring_func": "sigmoid"}),
    "exaone-moe": Converted(
        "exaone_moe",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "first_k_dense_replace": 1,
        },
        {"scoring_func": "sigmoid"},
    ),
    "glm-dsa": Converted("glm_moe_dsa", _INDEXED | {"indexer_types": ["full", "full", "shared"]}),
    "glm5-next": Converted(
        "glm5_next",
        {"text_config": _INDEXED | {"num_hidden_layers": 2, "qk_rope_head_dim": 0}},
        {
            "first_k_dense_replace": 0,
            "linear_attn_config": _KDA | {"gate_lower_bound": -5.0},
            "mla_use_nope": True,
        },
    ),
    "kimi-linear": Converted(
        "kimi_linear",
        {
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        },
        {
            "first_k_dense_replace": 0,
            "linear_attn_config": _KDA | {"full_attn_layers": [2], "kda_layers": [1]},
            "moe_router_activation_func": "sigmoid",
            "num_shared_experts": 1,
        },
    ),
    "gemma4": Converted(
        "gemma4_text",
        {
            "attention_k_eq_v": True,
            "final_logit_softcapping": 30.0,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 16,
            "intermediate_size": 64,
            "num_global_key_value_heads": 1,
        },
    ),
    "hy_v3": Converted("hy_v3"),
    "laguna": Converted(
        "laguna",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "num_attention_heads_per_layer": [4, 2],
            "rope_parameters": {
                "full_attention": _YARN | {"partial_rotary_factor": 0.5, "rope_theta": 5e5},
                "sliding_attention": {
                    "partial_rotary_factor": 1.0,
                    "rope_theta": 1e4,
                    "rope_type": "default",
                },
            },
        },
    ),
    "mimo2": Converted(
        "mimo_v2_flash",
        {
            "v_head_dim": 16,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5}
                for kind, base in (("full_attention", 5e6), ("sliding_attention", 1e4))
            },
        },
        {
            "hybrid_layer_pattern": [0, 1],
            "rope_parameters": {
                "partial_rotary_factor": 0.5,
                "rope_theta": 5e6,
                "sliding_attention": {"rope_theta": 1e4},
            },
            "scoring_func": "sigmoid",
            "swa_head_dim": 16,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_v_head_dim": 16,
            "topk_method": "noaux_tc",
        },
    ),
    "minimax-m3": Converted(
        "minimax_m3_vl",
        {
            "text_config": {
                "dense_intermediate_size": 64,
                "index_block_size": 2,
                "index_topk_blocks": 4,
                "intermediate_size": 32,
                "layer_types": ["full_attention", "minimax_m3_sparse"],
                "mlp_layer_types": ["dense", "sparse"],
                "rope_parameters": {
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 1e4,
                    "rope_type": "default",
                },
                "rotary_dim": 8,
                "shared_intermediate_size": 32,
            }
        },
        {
            "moe_layer_freq": [0, 1],
            "n_shared_experts": 1,
            "scoring_func": "sigmoid",
            "sparse_attention_config": {
                "sparse_block_size": 2,
                "sparse_index_dim": 16,
                "sparse_local_block": 1,
                "sparse_num_index_heads": 2,
                "sparse_topk_blocks": 4,
            },
        },
    ),
    "nemotron_h_moe": Converted("nemotron_h", {"mamba_head_dim": 16, "mamba_num_heads": 4}),
    "qwen35moe": Converted("qwen3_5_moe_text", {"rope_parameters": _IN_SECTIONS}),
    "qwen3moe": Converted("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3next": Converted("qwen3_next"),
    "qwen4exp": Converted(
        "qwen4_exp_text",
        {
            "hc_count": 2,
            "hc_lowrank": 32,
            "indexer_n_heads": 8,
            "heads_per_ngram": 1,
            "make_ngram_vocab_size_divisible_by": 8,
            "ngram_vocab_size_base": 32,
            "output_gate_type": "sigmoid",
            "ple_layer_ids": [1],
            "rope_parameters": _IN_SECTIONS,
            "split_ngram_parts": 2,
        },
        {"layer_types": ["linear_attention", "full_attention"]},
    ),
}
"""By the name that files give their architecture."""

# A vocabulary that the converter does not know is written as one of Qwen2, and every vocabulary by
# the function for byte-level ones, without the tokens that AutoTokenizer adds for some families. A
# config.json counts as it is published, over what transformers makes of it. A model of transformers
# has no layers of further tokens.
_CONVERT = """
import json, sys
sys.path.insert(0, sys.argv[1])
sys.argv = [sys.argv[1] + "/convert_hf_to_gguf.py", *sys.argv[2:]]
import transformers
transformers.AutoTokenizer = transformers.PreTrainedTokenizerFast
import convert_hf_to_gguf as converter
converter.ModelBase.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
parsed = converter.ModelBase.load_hparams
def load_hparams(folder, *others, **named):
    return parsed(folder, *others, **named) | json.loads((folder / "config.json").read_text())
converter.ModelBase.load_hparams = staticmethod(load_hparams)
named = converter.get_model_class
def get_model_class(*given, **others):
    found = named(*given, **others)
    found.set_vocab = lambda self: self._set_vocab_gpt2()
    found.no_mtp = True
    found.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
    return found
converter.get_model_class = get_model_class
converter.main()
"""


def model_of(name: str) -> PreTrainedModel:
    """Return the model of transformers, float32, whose numbers are in the file of this name.

    Every parameter and buffer of floats has multiples of 1/16 from -1/4 to 1/4, added to its value
    where it is born with a single one, as norms are.
    """
    family, fields, *_ = CONVERTED[name]
    model = tiny(family, _SIZES, fields)
    for key, tensor in model.state_dict().items():
        generator = torch.Generator().manual_seed(crc32(key.encode()))
        if tensor.is_floating_point():
            drawn = torch.randint(-4, 5, tensor.shape, generator=generator) / 16
            # `tiny` adds a tenth of a normal number to ones and zeros
            born = 1.0 if tensor.dim() == 1 and tensor.mean() > 0.5 else 0.0
            tensor.copy_(drawn + born)
        elif key.endswith(".tid2eid"):  # the experts of each token
            scores = torch.rand(len(tensor), model.config.num_local_experts, generator=generator)
            tensor.copy_(scores.argsort(1)[:, : tensor.shape[1]])
    return model


def convert(name: str, converter: Path, out: Path) -> None:
    """Write the file of this name. Raises CalledProcessError if the converter fails."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        model_of(name).save_pretrained(folder, save_original_format=True)
        weights = folder / "model.safetensors"
        save_file(_as_published(CONVERTED[name], load_file(weights)), weights)
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | CONVERTED[name].published))
        _tokenizer().save_pretrained(folder)
        path = Path(temporary, "model.gguf")
        arguments = [folder, "--outtype", "f32", "--outfile", path]
        subprocess.run([sys.executable, "-c", _CONVERT, converter, *arguments], check=True)
        out.write_bytes(lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME))


def _as_published(model: Converted, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors by their published names, routed experts in MXFP4 if `in_mxfp4`, which
    holds the numbers of `model_of` exactly."""
    published = {}
    for name, tensor in tensors.items():
        for pattern, new in model.names.items():
            name = re.sub(pattern, new, name)
        if model.in_mxfp4 and ".experts." in name:
            published[name.replace(".weight", ".scale")] = torch.full(
                (len(tensor), tensor.shape[1] // 32), 124, dtype=torch.uint8
            )  # 1/8
            codes = (tensor.abs() * 16).byte() | (tensor < 0).byte() << 3
            tensor = codes[:, ::2] | codes[:, 1::2] << 4
        published[name] = tensor
    return published


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {text: index for index, text in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def main() -> None:
    parser = parser_of(__doc__, converter=(Path, "folder of llama.cpp"))
    parser.add_argument("folder", type=Path, help="folder to write to")
    parser.add_argument("names", nargs="*", default=list(CONVERTED), help="architectures")
    options = parser.parse_intermixed_args()
    for name in options.names:
        convert(name, options.converter, options.folder / f"{name}.gguf.xz")


if __name__ == "__main__":
    main()
