"""Pre-tokenizers of GGUF files with a byte-level tokenizer: how they split text before the merges,
by the name in the file, as llama.cpp understands the name (llama-vocab.cpp)."""

from collections.abc import Mapping
from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split

_SHORTENED = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"  # what a word takes with it
_NO_SMALL = r"(?:(?=\p{L})[^a-z])"
_NO_CAPITAL = r"(?:(?=\p{L})[^A-Z])"
_HAN = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}"
    r"\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}]"
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORTENED}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_SHORTENED}|{_BEFORE}\p{{L}}+|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN35 = (
    rf"{_SHORTENED}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_CASES = rf"{_BEFORE}{_NO_SMALL}*{_NO_CAPITAL}+%s|{_BEFORE}{_NO_SMALL}+{_NO_CAPITAL}*%s"
_SYMBOLS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASES % ('', '')}|\p{{N}}|{_SYMBOLS_AND_SLASHES}|{_SPACES}"
_GPT4O = (
    rf"{_CASES % (f'{_SHORTENED}?', f'{_SHORTENED}?')}|\p{{N}}{{1,3}}"
    rf"|{_SYMBOLS_AND_SLASHES}|{_SPACES}"
)
_KIMI = rf"{_HAN}+|{_BEFORE}(?:(?!{_HAN})\p{{L}})+{_SHORTENED}?|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_EASTERN = r"(?:(?!\s)[\x{0800}-\x{9FA5}\x{AC00}-\x{D7FF}])+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EASTERN, r"\p{N}")
_DEEPSEEK = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?(?:[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}]"
    r"|(?!\s)[\x{3000}-\x{3002}])+",
    r"\s+$",
    _EASTERN,
    r"\p{N}+",
)
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")


class Splitting(NamedTuple):
    """Expressions that each split what the one before it left. Also, whether a piece that is a
    token stays whole whatever the merges, and whether texts begin with the token for that, unless a
    file says otherwise."""

    expressions: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


_BY_NAMES = {
    "default": Splitting(_DEFAULT),
    "gpt-2 olmo mpt jais phi-2 gigachat a.x-4.0 mellum trillion granite-docling exaone4": Splitting(
        (_GPT2,)
    ),
    "refact starcoder command-r smollm codeshell exaone minerva-7b mellum2": Splitting(
        (r"\p{N}", _GPT2)
    ),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": Splitting(
        (_LLAMA3,), True, True
    ),
    "glm4 chatglm-bpe dbrx smaug-bpe": Splitting((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": Splitting(
        (_QWEN2,)
    ),
    "qwen35": Splitting((_QWEN35,)),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Splitting((_GPT4O,)),
    "tekken": Splitting((_TEKKEN,), True, True),
    "kimi-k2": Splitting((_KIMI,)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Splitting(_DEEPSEEK_3),
    "deepseek-llm": Splitting(_DEEPSEEK),
    "deepseek-coder": Splitting(_DEEPSEEK_CODER),
    "falcon": Splitting(_FALCON),
}
_BY_NAME: Mapping[str, Splitting] = {
    name: split for names, split in _BY_NAMES.items() for name in names.split()
}
OF_CHARACTERS = ("gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace")
"""Names of vocabularies that are no byte-level ones."""


def splitting_of(name: str) -> Splitting | None:
    """Return how text is split by this name, None if it is not known."""
    return _BY_NAME.get(name)


AS_GPT2 = Splitting((_GPT2,))
"""Splitting for a name that is not known."""


def pre_tokenizer(splitting: Splitting) -> PreTokenizer:
    """Return the step of a tokenizer that splits a text and spells its bytes as characters."""
    splits = [Split(Regex(expression), "isolated") for expression in splitting.expressions]
    return pre_tokenizers.Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
