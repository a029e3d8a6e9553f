"""How the tokenizer of a GGUF file splits text before its merges, by the name that the file gives it."""

from collections.abc import Mapping

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split
from transformers import PreTrainedTokenizerFast

_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORTENED}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SPLITS: Mapping[str, tuple[str, ...]] = {
    "deepseek-v3": _DEEPSEEK_3,
    "hunyuan-dense": _DEEPSEEK_3,
    "kimi-k2": _KIMI,
}
"""Of each name that transformers does not know the expressions, one after another, as llama-vocab.cpp has them."""

_ALIKE = {"chatglm-bpe": "llama3", "glm4": "llama3", "hunyuan": "qwen2"}  # names that transformers knows
_DIGITS = ("refact",)  # each digit is one piece, all else as GPT-2 splits it
_AS_GPT2 = ("default", "gpt-2", "jais", "mpt", "olmo")  # which is what transformers does with a name unknown to it


def split_as_named(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Make a byte-level tokenizer split text as `name` says, where transformers has not."""
    expressions = (_of_transformers()[_ALIKE[name]],) if name in _ALIKE else _SPLITS.get(name)
    if expressions:
        tokenizer.backend_tokenizer.pre_tokenizer = _sequence(expressions, ByteLevel(False, use_regex=False))
    elif name in _DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = _sequence((r"\p{N}",), ByteLevel(False))


def is_known(name: str) -> bool:
    """Whether text is split as `name` says."""
    return name in (*_SPLITS, *_ALIKE, *_DIGITS, *_AS_GPT2) or name in _of_transformers()


def _of_transformers() -> Mapping[str, str]:
    """The expression of each name that transformers knows; 5.17, which may be beside a GPU, cannot say."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return GGUF_PRE_TOKENIZER_SPLITS


def _sequence(expressions: tuple[str, ...], last: PreTokenizer) -> PreTokenizer:
    splits = [Split(Regex(expression), "isolated") for expression in expressions]
    return pre_tokenizers.Sequence([*splits, last])
