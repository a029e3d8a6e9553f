"""Small GGUF files of zeros with vocabularies as tests want them, which llama.cpp opens too."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers.convert_slow_tokenizer import bytes_to_unicode

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPECIAL = {
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
    "<think>": USER_DEFINED,
    "<unkk>": UNKNOWN,
    "[PAD7]": UNUSED,
    "<｜User｜>": CONTROL,
    "<｜plain｜>": NORMAL,
    "<|fim_prefix|>": NORMAL,
    "<|eot|>": NORMAL,
    "  x": USER_DEFINED,
}
TEXTS = (
    "",
    " ",
    "a",
    " a",
    "  hello world's  I'LL\n\n don't \r\n 12345 3.14",
    "HTTPServer camelCase ÄRZTE straße naïve e\u0301",
    "世界 你好 こんにちは カタカナ 안녕 привет МИР עברית हिन्दी 😀 👩‍👩‍👧 ½ Ⅷ ١٢٣ \u3000 \u00a0",
    "x+y=z a<b>c (foo)[bar]{baz} foo_bar/// https://a.b/c?d=e&f -- “q” $100",
    *(f"the {token} world{token}\n\n{token}  x" for token in SPECIAL),
)


def byte_level(special: Mapping[str, int] = SPECIAL, *, num_merges: int = 600) -> dict[str, object]:
    """A vocabulary whose merges cross words, so that every way of splitting gives other tokens."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        TEXTS * 2,
        BpeTrainer(
            vocab_size=256 + num_merges,
            initial_alphabet=alphabet,
            max_token_length=5,
            show_progress=False,
        ),
    )
    merges = _merges(trained)
    made = dict.fromkeys("".join(pair) for pair in merges)  # several pairs make the same
    tokens = ["<pad>", "<bos>", "<xos>", *bytes_to_unicode().values(), *made, *special]
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3 - len(special)) + list(special.values())
    return {
        "kind": "gpt2",
        "tokens": tokens,
        "types": types,
        "merges": [" ".join(pair) for pair in merges],
    }


def sentencepiece(*, distinct: bool = True) -> dict[str, object]:
    """A vocabulary with scores, which many tokens share unless they are `distinct`."""
    trained = Tokenizer(BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        TEXTS * 2, BpeTrainer(vocab_size=900, max_token_length=6, show_progress=False)
    )
    known = trained.get_vocab()
    pieces = [text for text in sorted(known, key=known.get) if text not in SPECIAL]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *pieces,
        *SPECIAL,
    ]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), *SPECIAL.values()]
    scores = [-float(i) if distinct else float(len(text)) for i, text in enumerate(tokens)]
    return {"kind": "llama", "tokens": tokens, "types": types, "scores": scores}


def of_characters() -> dict[str, object]:
    """A vocabulary of merges of characters within lines, and within runs of newlines."""
    trained = Tokenizer(BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    trainer = BpeTrainer(vocab_size=700, max_token_length=6, show_progress=False)
    trained.train_from_iterator(TEXTS[:7] * 2, trainer)
    known = trained.get_vocab()
    pieces = [text for text in sorted(known, key=known.get) if text not in SPECIAL]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *byte_tokens, *pieces, *SPECIAL]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    return {
        "kind": "gemma4",
        "tokens": tokens,
        "types": [*types, *SPECIAL.values()],
        "merges": [" ".join(pair) for pair in _merges(trained)],
        "scores": [0.0] * len(tokens),
    }


def _merges(trained: Tokenizer) -> list[list[str]]:
    return json.loads(trained.to_str())["model"]["merges"]


def write_vocabulary(
    path: Path,
    *,
    kind: str,
    tokens: Sequence[str],
    types: Sequence[int] | None = None,
    merges: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
    entries: Mapping[str, object] | None = None,
) -> Path:
    """Write a file; `entries` are further ones behind `tokenizer.ggml.`, or whole keys with a
    dot."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    sizes = {
        "block_count": 1,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 64,
    }
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 2, "attention.key_length": 32}
    sizes |= {
        "attention.value_length": 32,
        "expert_count": 2,
        "expert_used_count": 1,
        "expert_feed_forward_length": 64,
    }
    for name, size in sizes.items():
        writer.add_uint32(f"qwen3moe.{name}", size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    lists = {"token_type": types, "merges": merges, "scores": scores}
    for name, value in (lists | dict(entries or {})).items():
        key = name if "." in name else f"tokenizer.ggml.{name}"
        if value is not None:
            _add(writer, key, value)
    for name, shape in _shapes(len(tokens)).items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _shapes(num_tokens: int) -> dict[str, tuple[int, ...]]:
    layer = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (64, 64))
    layer |= dict.fromkeys(("attn_norm", "ffn_norm"), (64,)) | dict.fromkeys(
        ("attn_q_norm", "attn_k_norm"), (32,)
    )
    layer |= {"ffn_gate_inp": (2, 64)}
    layer |= dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), (2, 64, 64))
    whole = {"token_embd": (num_tokens, 64), "output": (num_tokens, 64), "output_norm": (64,)}
    return whole | {f"blk.0.{name}": shape for name, shape in layer.items()}
