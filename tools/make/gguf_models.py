"""Write GGUF files of random weights that llama.cpp opens, with layers as wide as published ones.

    python -m tools.make.gguf_models OUT                          all of them
    python -m tools.make.gguf_models OUT qwen3moe-Q4_K            some

Every block of a type is one of a pool of random ones, with scales that keep weights small. Good for
measuring time: routers choose experts about equally often, and a token costs what one of a trained
model does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from tools.arguments import parser_of
from tools.make.converted import TOKENS

_POOL = 1 << 18  # bytes of random blocks
_HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}
"""Where blocks of a type have numbers in 16 bits; other types: at their beginning."""
_EXPONENTS = (118, 122)  # of MXFP4


@dataclass(frozen=True, slots=True)
class RandomModel:
    """Sizes of a model, in the letters of its layers, and the types of its experts and of its
    other matrices."""

    architecture: str
    experts: str
    others: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int = 32_000

    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return shapes and types by name."""
        hidden = self.hidden
        inner = self.intermediate
        count = self.num_experts
        wide = self.heads * self.head_size
        narrow = self.kv_heads * self.head_size
        other = self.others
        one: dict[str, tuple[tuple[int, ...], str]] = {
            "attn_norm.weight": ((hidden,), "F32"),
            "attn_q.weight": ((wide, hidden), other),
            "attn_k.weight": ((narrow, hidden), other),
            "attn_v.weight": ((narrow, hidden), other),
            "attn_output.weight": ((hidden, wide), other),
            "ffn_gate_inp.weight": ((count, hidden), "F32"),
            "ffn_gate_exps.weight": ((count, inner, hidden), self.experts),
            "ffn_up_exps.weight": ((count, inner, hidden), self.experts),
            "ffn_down_exps.weight": ((count, hidden, inner), self.experts),
        }
        one |= {name: (shape(self), "F32") for name, shape in _MORE[self.architecture].items()}
        named = {
            f"blk.{at}.{name}": each for at in range(self.layers) for name, each in one.items()
        }
        ends = dict.fromkeys(("token_embd", "output"), ((self.vocabulary, hidden), other))
        return {
            **{f"{name}.weight": each for name, each in ends.items()},
            "output_norm.weight": ((hidden,), "F32"),
            **named,
        }


_MORE = {
    "olmoe": {
        "attn_q_norm.weight": lambda model: (model.heads * model.head_size,),
        "attn_k_norm.weight": lambda model: (model.kv_heads * model.head_size,),
        "ffn_norm.weight": lambda model: (model.hidden,),
    },
    "qwen3moe": {
        "attn_q_norm.weight": lambda model: (model.head_size,),
        "attn_k_norm.weight": lambda model: (model.head_size,),
        "ffn_norm.weight": lambda model: (model.hidden,),
    },
    "llama": {"ffn_norm.weight": lambda model: (model.hidden,)},
    "gpt-oss": {
        "post_attention_norm.weight": lambda model: (model.hidden,),
        "attn_sinks.weight": lambda model: (model.heads,),
        "attn_q.bias": lambda model: (model.heads * model.head_size,),
        "attn_k.bias": lambda model: (model.kv_heads * model.head_size,),
        "attn_v.bias": lambda model: (model.kv_heads * model.head_size,),
        "attn_output.bias": lambda model: (model.hidden,),
        "ffn_gate_inp.bias": lambda model: (model.num_experts,),
        "ffn_gate_exps.bias": lambda model: (model.num_experts, model.intermediate),
        "ffn_up_exps.bias": lambda model: (model.num_experts, model.intermediate),
        "ffn_down_exps.bias": lambda model: (model.num_experts, model.hidden),
    },
}
"""What architectures have besides."""

OLMOE = (2048, 1024, 64, 8, 4, 16, 16, 128)
QWEN3 = (2048, 768, 128, 8, 3, 32, 4, 128)
QWEN3_NARROW = (1024, 512, 64, 4, 12, 16, 4, 64)
MIXTRAL = (1024, 3584, 8, 2, 6, 8, 8, 128)
GPT_OSS = (2880, 2880, 32, 4, 2, 64, 8, 64)
TINY = (256, 256, 8, 2, 2, 4, 2, 64, len(TOKENS))
DEEP = (256, 256, 8, 2, 40, 4, 2, 64, len(TOKENS))
WORDS = (256, 256, 8, 2, 2, 4, 2, 64, 128_000)
FITTED = (1536, 1280, 24, 4, 4, 12, 4, 128)
TYPES = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS", "MXFP4")

MODELS = {
    "olmoe-Q4_K": RandomModel("olmoe", "Q4_K", "Q4_K", *OLMOE),
    "olmoe-Q8_0": RandomModel("olmoe", "Q8_0", "Q8_0", *OLMOE),
    "qwen3moe-Q4_K": RandomModel("qwen3moe", "Q4_K", "Q6_K", *QWEN3),
    "qwen3moe-Q4_0": RandomModel("qwen3moe", "Q4_0", "Q8_0", *QWEN3),
    "qwen3moe-IQ4_XS": RandomModel("qwen3moe", "IQ4_XS", "Q6_K", *QWEN3),
    "qwen3moe-narrow-Q8_0": RandomModel("qwen3moe", "Q8_0", "Q8_0", *QWEN3_NARROW),
    "qwen3moe-narrow-Q4_K": RandomModel("qwen3moe", "Q4_K", "Q6_K", *QWEN3_NARROW),
    "llama-Q4_0": RandomModel("llama", "Q4_0", "Q4_0", *MIXTRAL),
    "llama-Q6_K": RandomModel("llama", "Q6_K", "Q6_K", *MIXTRAL),
    "gpt-oss-MXFP4": RandomModel("gpt-oss", "MXFP4", "Q8_0", *GPT_OSS),
}
FITTED_ON = {
    "tiny": RandomModel("qwen3moe", "Q8_0", "Q8_0", *TINY),
    "deep": RandomModel("qwen3moe", "Q8_0", "Q8_0", *DEEP),
    "words": RandomModel("qwen3moe", "Q8_0", "Q8_0", *WORDS),
    **{f"fitted-{kind}": RandomModel("llama", kind, kind, *FITTED) for kind in TYPES},
}
"""Models that constants of llama.cpp's speed are fitted on; no prediction is tested on them."""


def make(model: RandomModel, out: Path, *, seed: int = 0) -> int:
    """Write a file; return its bytes."""
    writer = gguf.GGUFWriter(out, model.architecture)
    _describe(writer, model)
    random = np.random.default_rng(seed)
    kinds = {type_ for _, type_ in model.tensors().values()}
    pools = {kind: _pool(kind, random) for kind in sorted(kinds)}
    tensors = model.tensors()
    for name, (shape, kind) in tensors.items():
        stored = gguf.quant_shape_to_byte_shape(shape, Type[kind])
        size = (prod(stored), np.dtype(np.uint8))
        writer.add_tensor_info(name, stored, size[1], size[0], raw_dtype=Type[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, (shape, kind) in tensors.items():
        stored = gguf.quant_shape_to_byte_shape(shape, Type[kind])
        content = np.resize(pools[kind], prod(stored))
        if "norm" in name:
            content = np.ones(shape, np.float32).view(np.uint8)
        writer.write_tensor_data(content)
    writer.close()
    return out.stat().st_size


def _pool(kind: str, random: np.random.Generator) -> np.ndarray:
    """Return random blocks, uint8 [n]: numbers are about 0.02 or less."""
    if kind == "F32":
        return (random.standard_normal(_POOL // 4, np.float32) * 0.02).view(np.uint8)
    _, nbytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    # an odd count, so that equal rows of a matrix do not follow each other
    blocks = random.integers(0, 256, (_POOL // nbytes | 1, nbytes), np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = random.integers(*_EXPONENTS, len(blocks))
        return blocks.ravel()
    for at in _HALVES.get(kind, (0,)):
        scales = random.uniform(1e-4, 3e-4, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.ravel()


def _describe(writer: gguf.GGUFWriter, model: RandomModel) -> None:
    writer.add_block_count(model.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(model.hidden)
    writer.add_feed_forward_length(model.intermediate)
    writer.add_expert_feed_forward_length(model.intermediate)
    writer.add_expert_count(model.num_experts)
    writer.add_expert_used_count(model.top_k)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head_size)
    writer.add_value_length(model.head_size)
    writer.add_rope_dimension_count(model.head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    if model.architecture == "gpt-oss":
        writer.add_sliding_window(128)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    further = [f"<{number}>" for number in range(model.vocabulary - len(TOKENS))]
    writer.add_token_list([*TOKENS, *further])
    writer.add_token_types([3] * 3 + [1] * (model.vocabulary - 3))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="folder to write to")
    parser.add_argument("names", nargs="*", default=list(MODELS), help="models")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        nbytes = make((MODELS | FITTED_ON)[name], options.folder / f"{name}.gguf")
        print(f"{name}: {nbytes / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
