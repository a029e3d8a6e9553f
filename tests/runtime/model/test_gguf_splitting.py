"""Text is split as the name in a GGUF file says, and where that is unknown the model says so."""

from pathlib import Path

import gguf
import pytest

from runtime.model.open import open_model
from tests.helpers.gguf_files import every, write

TEXT = "it's 12345 Ärzte+x 世界ab"
PIECES = {
    "chatglm-bpe": ["it", "'s", " ", "123", "45", " Ärzte", "+x", " 世界ab"],
    "deepseek-v3": ["it", "'s", " ", "123", "45", " Ärzte", "+x", " ", "世界", "ab"],
    "hunyuan": ["it", "'s", " ", "1", "2", "3", "4", "5", " Ärzte", "+x", " 世界ab"],
    "kimi-k2": ["it's", " ", "123", "45", " Ärzte", "+x", " ", "世界", "ab"],
    "refact": ["it", "'s", " ", "1", "2", "3", "4", "5", " Ärzte", "+", "x", " 世界ab"],
    "bailingmoe": ["it", "'s", " 12345", " Ärzte", "+", "x", " 世界ab"],
}


@pytest.mark.parametrize("name", PIECES)
def test_text_is_split_as_named(tmp_path: Path, name: str) -> None:
    def describe(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.ggml.pre"]
        writer.add_tokenizer_pre(name)

    opened = open_model(str(write("qwen3_moe", tmp_path / "model.gguf", every("Q8_0"), describe=describe)))
    pieces = opened.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:stop] for _, (start, stop) in pieces] == PIECES[name]
    assert opened.tokenizer.decode(opened.tokenizer(TEXT).input_ids) == TEXT
    assert any(f"not as {name}" in line for line in opened.unfollowed) == (name == "bailingmoe")
