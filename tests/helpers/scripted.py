"""A model that says what a script tells: its layers add nothing, and each token leads to one other.
So a server can be asked for calls of tools and for thoughts, and answers by its own way."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from tests import ROOT
from tests.helpers import families

TEMPLATE = ROOT / "tests" / "data" / "replies" / "qwen3.jinja"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
SCRIPT = {
    "<|say|>": ("<think>\nA", " sheep?", "\n</think>\n\n", "Good ", "day", "."),
    "<|call|>": ("<think>\nAdd them.", "</think>\n\n", CALL),
    "<|tell|>": ("It is ", "5."),
}
_ENDING = """{% if messages[-1].role == "tool" %}<|tell|>{% elif tools %}<|call|>{% else %}<|say|>{% endif %}"""


def save(path: Path, script: Mapping[str, Sequence[str]] = SCRIPT, ending: str = _ENDING) -> Path:
    """Write a checkpoint whose reply after a prompt that ends with one of `script` is its texts,
    each a token. `ending` is the end of its chat template."""
    tokenizer = families.character_tokenizer()
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8") + ending
    texts = [text for said in script.values() for text in said]
    assert len({*texts}) == len(texts), "each token leads to one other"
    tokenizer.add_tokens([*script, *texts])
    size = 128
    assert len(tokenizer) <= size
    fields = {"vocab_size": len(tokenizer), "hidden_size": size, "max_position_embeddings": 2048}
    model = families.FAMILIES["olmoe"](fields)[1]
    _teach(model, tokenizer, script)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@torch.no_grad()
def _teach(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, script: Mapping[str, Sequence[str]]
) -> None:
    """Have each token lead to the next one of the script, and all others to the end."""
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            parameter.zero_()
    number = tokenizer.get_vocab()
    model.get_input_embeddings().weight.copy_(torch.eye(len(tokenizer), model.config.hidden_size))
    head = model.get_output_embeddings().weight
    head.zero_()
    head[tokenizer.eos_token_id, : len(tokenizer)] = 10.0
    for begin, said in script.items():
        for before, after in zip((begin, *said), said, strict=False):
            head[tokenizer.eos_token_id, number[before]] = 0.0
            head[number[after], number[before]] = 10.0
