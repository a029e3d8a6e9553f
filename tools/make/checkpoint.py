"""Write a random Mixture-of-Experts checkpoint of any size, one layer at a time: only one layer is
ever in memory.

    python -m tools.make.checkpoint OUT --family olmoe --layers 10 --experts 64 --hidden 1024 --intermediate 512

makes 2 GiB in bfloat16: one shard a layer, in the layout that published checkpoints have (one
tensor per expert and projection), with a tokenizer of bytes. Routers and weights are random: good
for measuring memory, time and exactness of loading, not for measuring anything that depends on what
routers have learned.
"""

import argparse
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion

from tools.arguments import parser_of

log = logging.getLogger("make_checkpoint")


@dataclass(frozen=True, slots=True)
class Names:
    """A family's config names of the two dimensions whose names differ between families."""

    num_experts: str
    intermediate: str


FAMILIES = {
    "olmoe": Names("num_experts", "intermediate_size"),
    "mixtral": Names("num_local_experts", "intermediate_size"),
    "qwen2_moe": Names("num_experts", "moe_intermediate_size"),
    "qwen3_moe": Names("num_experts", "moe_intermediate_size"),
}
FIRST = "model.layers.0."
END = "<end>"


def main() -> None:
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    single = make_config(options, tokenizer, layers=1)
    weight_map: dict[str, str] = {}
    for layer in range(options.layers):
        shard = f"model-{layer + 1:05}-of-{options.layers:05}.safetensors"
        tensors = layer_tensors(single, layer, fused=options.layout == "fused")
        save_file(tensors, options.out / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard)
        log.info(
            "%s: %d tensors, %d bytes", shard, len(tensors), (options.out / shard).stat().st_size
        )
    index = {"metadata": {}, "weight_map": weight_map}
    (options.out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    make_config(options, tokenizer, layers=options.layers).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


def make_config(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, *, layers: int
) -> PreTrainedConfig:
    names = FAMILIES[options.family]
    return AutoConfig.for_model(
        options.family,
        vocab_size=len(tokenizer),
        hidden_size=options.hidden,
        num_hidden_layers=layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 64,
        num_experts_per_tok=options.top_k,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        dtype="bfloat16",
        **{names.num_experts: options.experts, names.intermediate: options.intermediate},
    )


def layer_tensors(single: PreTrainedConfig, layer: int, *, fused: bool) -> dict[str, torch.Tensor]:
    """The stored tensors of decoder layer `layer`, made as a model of one; layer 0 brings
    embeddings, norm and head."""
    model = AutoModelForCausalLM.from_config(single, dtype=torch.bfloat16)
    tensors = model.state_dict() if fused else revert_weight_conversion(model, model.state_dict())
    return {
        name.replace(FIRST, f"model.layers.{layer}."): tensor.clone()
        for name, tensor in tensors.items()
        if layer == 0 or name.startswith(FIRST)
    }


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, plus one pair, without which llama.cpp opens no vocabulary, and one
    that ends a text."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    merges = [("t", "h")]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        layers=10,
        experts=64,
        top_k=8,
        hidden=(1024, "a multiple of 64"),
        intermediate=(512, "of one expert"),
        seed=0,
    )
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="olmoe")
    parser.add_argument("--layout", choices=("hub", "fused"), default="hub")
    return parser.parse_args()


if __name__ == "__main__":
    main()
