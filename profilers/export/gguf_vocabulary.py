"""The entries of a GGUF file that describe a vocabulary: tokens, merges, and how text is split
before them."""

from collections.abc import Mapping
from pathlib import Path

from artifacts.common.untrusted import read_json
from artifacts.errors import BadInput

# llama.cpp's llama_token_type
_NORMAL = 1
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
_BYTES = "ByteLevel"
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How llama.cpp names a way of splitting, by the steps of `pre_tokenizer` in tokenizer.json.
_SPLITTINGS = {(_BYTES,): "gpt-2", ("Digits", _BYTES): "smollm", (_QWEN, _BYTES): "qwen2"}


def add_vocabulary(writer: "gguf.GGUFWriter", folder: Path, num_tokens: int) -> None:  # noqa: F821
    """Add what tokenizer.json in `folder` says.

    Raises BadInput where it is missing or no byte-level BPE, and for a splitting that llama.cpp has
    no name for.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise BadInput(f"{path} is missing: a GGUF file holds its vocabulary")
    described = read_json(path)
    model = described["model"]
    if model.get("type") != "BPE" or not model.get("merges"):
        raise BadInput(
            f"{path} is no byte-level BPE with merges, and moectl writes no other tokenizer as GGUF"
        )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_splitting(described, path))
    tokens, types = _tokens(described, num_tokens)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    )
    _add_special(writer, folder)


def _splitting(described: Mapping, path: Path) -> str:
    steps = described.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    named = tuple(
        step["pattern"]["Regex"] if step.get("type") == "Split" else step.get("type")
        for step in steps
    )
    if named not in _SPLITTINGS:
        raise BadInput(
            f"{path} splits text in a way ({', '.join(map(str, named))[:80]}) that moectl cannot "
            "name in GGUF"
        )
    return _SPLITTINGS[named]


def _tokens(described: Mapping, num_tokens: int) -> tuple[list[str], list[int]]:
    """The token of every id with its type; ids beyond the vocabulary are unused."""
    tokens = [f"[PAD{i}]" for i in range(num_tokens)]
    types = [_UNUSED] * num_tokens
    for token, i in described["model"]["vocab"].items():
        tokens[i] = token
        types[i] = _NORMAL
    for added in described["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    return tokens, types


def _add_special(writer: "gguf.GGUFWriter", folder: Path) -> None:  # noqa: F821
    """Add the special tokens that the generation config names, or else the config, and the chat
    template."""
    stated = _read(folder / "config.json") | _read(folder / "generation_config.json")
    for which in ("bos", "eos", "pad"):
        tokens = stated.get(f"{which}_token_id")
        for token in tokens[:1] if isinstance(tokens, list) else [tokens] * (tokens is not None):
            getattr(writer, f"add_{which}_token_id")(token)
    writer.add_add_bos_token(False)
    template = _read(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, str):
        writer.add_chat_template(template)


def _read(path: Path) -> dict:
    return read_json(path) if path.is_file() else {}
