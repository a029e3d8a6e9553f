"""Vocabulary of a GGUF file: the types of its tokens, which of them have a role, and which end an
answer.

Files state this only in part. The rest follows from the texts of tokens, by the rules of llama.cpp
(llama-vocab.cpp), for which files are made. Without torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from artifacts.errors import BadInput
from artifacts.formats.gguf.gguf_header import read_array, read_header

# kinds of tokenizers, `tokenizer.ggml.model`
BYTE_LEVEL = "gpt2"
SENTENCEPIECE = "llama"
CHARACTERS = "gemma4"
_NO_TEXT = (None, "none", "no_vocab")
# types of tokens
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
_PREFIX = "tokenizer.ggml."

_DEFAULTS = {
    BYTE_LEVEL: {"bos": 11, "eos": 11},
    SENTENCEPIECE: {"bos": 1, "eos": 2, "unknown": 0},
    CHARACTERS: {},
}
_ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding")
_OF_FILLING = (
    "fim_pre",
    "fim_suf",
    "fim_mid",
    "fim_pad",
    "fim_rep",
    "fim_sep",
)  # fill in the middle
_FORMER = {"prefix": "fim_pre", "suffix": "fim_suf", "middle": "fim_mid"}
_BY_TEXT = {
    "eot": "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> "
    "[EOT] <｜end▁of▁sentence｜> <end_of_utterance>",
    "eom": "<|eom_id|>",
    "fim_pre": (
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> "
        "<|prefix|>"
    ),
    "fim_suf": (
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> "
        "<|suffix|>"
    ),
    "fim_mid": (
        "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> "
        "<|middle|>"
    ),
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
"""The texts of tokens by their role, where the file names none for it."""

_ENDING = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> "
    "<eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~["
)
"""Texts of tokens that end an answer, in any vocabulary."""

_ENDING_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_FRAMING = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""gpt-oss's, found in a text whatever their type. llama.cpp shows them in an answer; here they are
left out, as for the model in safetensors."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Vocabulary of a GGUF file. `kind` is how text becomes tokens; `tokens` and `types` are by id,
    `ids` by token. `roles` has the ids of special tokens by their role, and `ends` the ids of
    tokens that end an answer."""

    kind: str
    tokens: Sequence[str]
    ids: Mapping[str, int]
    types: Sequence[int]
    roles: Mapping[str, int]
    ends: frozenset[int]


def read_vocabulary(path: Path) -> Vocabulary | None:
    """Return the vocabulary of a GGUF file, the first of several; None if it has none.

    Raises BadInput for a vocabulary that is damaged, and for a kind that is not read.
    """
    entries = read_header(path).entries
    kind = entries.get(f"{_PREFIX}model")
    if kind in _NO_TEXT:
        return None
    if kind not in _DEFAULTS:
        raise BadInput(
            f"{path} has a tokenizer of the kind {str(kind)[:40]}: moectl reads "
            f"{', '.join(_DEFAULTS)}, take a file of these"
        )
    tokens = [
        text or f"[EMPTY_{i}]" for i, text in enumerate(read_array(path, f"{_PREFIX}tokens") or ())
    ]
    ids = {text: i for i, text in enumerate(tokens)}
    if len(ids) < len(tokens) or not tokens:
        raise BadInput(
            f"{path} has a vocabulary with {'a token twice' if tokens else 'no token'}: download "
            "it again"
        )
    types = list(vocabulary_numbers(path, "token_type", len(tokens)) or [NORMAL] * len(tokens))
    roles = _stated(entries, kind, len(tokens))
    ends = _complete(ids, types, roles)
    return Vocabulary(kind, tokens, ids, types, roles, frozenset(ends))


def vocabulary_numbers(path: Path, name: str, count: int) -> Sequence[float] | None:
    """Return the numbers of tokens that are called `name`, None if the file has none. Raises
    BadInput for fewer than `count` tokens."""
    key = f"{_PREFIX}{name}"
    numbers = read_array(path, key)
    if numbers is not None and (len(numbers) < count or isinstance(numbers[0], str)):
        raise BadInput(
            f"{path} has {key} of {len(numbers):,} tokens, and {count:,} tokens: download it again"
        )
    return numbers


def _stated(entries: Mapping[str, object], kind: str, num_tokens: int) -> dict[str, int]:
    """Return the ids that the file names, or that files of its kind have by default. An id outside
    the vocabulary counts as none."""
    roles = dict(_DEFAULTS[kind])
    if entries.get(f"{_PREFIX}pre") in ("glm4", "chatglm-bpe"):
        del roles["bos"]
    for name in (*_ROLES, *_OF_FILLING, *_FORMER):
        stated = entries.get(f"{_PREFIX}{name}_token_id")
        if type(stated) is int and 0 <= stated < num_tokens:
            roles[_FORMER.get(name, name)] = stated
    return {name: token for name, token in roles.items() if token < num_tokens}


def _complete(ids: Mapping[str, int], types: list[int], roles: dict[str, int]) -> set[int]:
    """Add to `roles` the tokens that are known by their text, correct the types of tokens, and
    return those that end an answer."""
    for name, texts in _BY_TEXT.items():
        found = _known(ids, texts.split())
        if name not in roles and found:
            roles[name] = found[0]
            types[found[0]] = CONTROL
    ends = set(_known(ids, _ENDING.split()))
    for token in (*ends, *_known(ids, _FRAMING)):
        types[token] = CONTROL
    ends |= {roles[name] for name in _ENDING_ROLES if name in roles}
    _take_out(ends, ids, types)
    return ends


def _known(ids: Mapping[str, int], texts: Sequence[str]) -> list[int]:
    return [ids[text] for text in texts if text in ids]


def _take_out(ends: set[int], ids: Mapping[str, int], types: list[int]) -> None:
    """Take out of `ends` the tokens that end only a part of an answer: `<|end|>` where other tokens
    end it (gpt-oss, solar-open), and a `</s>` beside Gemma 4's tokens, where it is plain text."""

    def has(*texts: str) -> bool:
        return any(ids.get(text) in ends for text in texts)

    if has("<|end|>") and has("<|call|>", "<|calls|>") and has("<|return|>", "<|flush|>"):
        ends.remove(ids["<|end|>"])
    if has("<|tool_response>") and has("</s>"):
        ends.remove(ids["</s>"])
        types[ids["</s>"]] = NORMAL
