"""Text is split as the name in a GGUF file says."""

import pytest

from runtime.model.gguf.splitting import pre_tokenizer, splitting_of

TEXT = "it's 12345 Ärzte+x 世界ab camelCase"
PIECES = {
    "chatglm-bpe": ["it", "'s", " ", "123", "45", " Ärzte", "+x", " 世界ab", " camelCase"],
    "deepseek-llm": [
        "it",
        "'",
        "s",
        " ",
        "12345",
        " Ä",
        "rzte",
        "+",
        "x",
        " ",
        "世界",
        "ab",
        " camelCase",
    ],
    "deepseek-v3": ["it", "'s", " ", "123", "45", " Ärzte", "+x", " ", "世界", "ab", " camelCase"],
    "default": ["it", "'", "s", " ", "123", "45", " Ärzte", "+", "x", " 世界ab", " camelCase"],
    "gpt-4o": ["it's", " ", "123", "45", " Ärzte", "+x", " 世界ab", " camel", "Case"],
    "hunyuan": ["it", "'s", " ", "1", "2", "3", "4", "5", " Ärzte", "+x", " 世界ab", " camelCase"],
    "kimi-k2": ["it's", " ", "123", "45", " Ärzte", "+x", " ", "世界", "ab", " camelCase"],
    "refact": [
        "it",
        "'s",
        " ",
        "1",
        "2",
        "3",
        "4",
        "5",
        " Ärzte",
        "+",
        "x",
        " 世界ab",
        " camelCase",
    ],
}


@pytest.mark.parametrize("name", PIECES)
def test_text_is_split_as_named(name: str) -> None:
    pieces = pre_tokenizer(splitting_of(name)).pre_tokenize_str(TEXT)
    assert [TEXT[start:stop] for _, (start, stop) in pieces] == PIECES[name]
