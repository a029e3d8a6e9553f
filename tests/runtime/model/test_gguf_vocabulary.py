"""The tokens that end an answer are those of llama.cpp; the lists here are what it prints of these
vocabularies."""

from pathlib import Path

import gguf
import pytest

from runtime.model.gguf.vocabulary import read_vocabulary
from runtime.model.open import open_model
from tests.helpers.gguf_files import every, write
from tests.helpers.gguf_vocabularies import CONTROL, NORMAL, byte_level, write_vocabulary

ENDING = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
    <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[
    <｜end▁of▁sentence｜>
    <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""
OTHERS = ("<|fim_prefix|>", "<|eot|>", "<|end_of_turn|>", "<|eos|>")


def read(path: Path, special: dict[str, int], **entries: object) -> tuple[set[str], dict[str, int]]:
    """The tokens that end an answer, and the types of the special ones."""
    made = byte_level(special, num_merges=10)
    found = read_vocabulary(write_vocabulary(path, **made, entries=entries))
    return {found.tokens[end] for end in found.ends}, {
        text: found.types[found.ids[text]] for text in special
    }


@pytest.mark.parametrize("text", (*ENDING.split(), *OTHERS))
def test_tokens_are_known_by_their_text_whatever_their_type(tmp_path: Path, text: str) -> None:
    ends, types = read(tmp_path / "m.gguf", {text: NORMAL}, eos_token_id=2)
    assert ends == {"<xos>", text} - set(OTHERS)
    assert types == {text: NORMAL if text in OTHERS[1:] else CONTROL}


KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def test_tokens_are_known_by_their_keys(tmp_path: Path) -> None:
    keys = {f"{name}_token_id": 50 + number for number, name in enumerate(KEYS)}
    ends, _ = read(tmp_path / "m.gguf", {"<|im_end|>": CONTROL, "<|fim_pad|>": CONTROL}, **keys)
    assert ends == {*byte_level({}, num_merges=0)["tokens"][50:56], "<|im_end|>"}


@pytest.mark.parametrize("entries", [{}, {"eos_token_id": 9999}])
def test_a_file_that_names_none_has_that_of_its_kind(tmp_path: Path, entries: dict) -> None:
    ends, _ = read(tmp_path / "m.gguf", {}, **entries)
    assert ends == {")"}


TAKEN_OUT = {
    "gpt-oss": ("<|end|>", ("<|return|>", "<|call|>"), CONTROL),
    "solar-open": ("<|end|>", ("<|calls|>", "<|flush|>"), CONTROL),
    "Gemma 4": ("</s>", ("<|tool_response>",), NORMAL),
}


@pytest.mark.parametrize(("text", "beside", "type_"), TAKEN_OUT.values(), ids=TAKEN_OUT)
def test_some_are_none_beside_others(tmp_path: Path, text: str, beside: tuple, type_: int) -> None:
    ends, types = read(tmp_path / "m.gguf", dict.fromkeys((text, *beside), CONTROL), eos_token_id=2)
    assert ends == {"<xos>", *beside}
    assert types[text] == type_
    ends, _ = read(
        tmp_path / "m.gguf", {text: CONTROL, beside[0]: CONTROL} if beside[1:] else {text: CONTROL}
    )
    assert text in ends


def test_what_frames_answers_of_gpt_oss_is_found_whatever_its_type(tmp_path: Path) -> None:
    assert read(tmp_path / "m.gguf", {"<|channel|>": NORMAL})[1] == {"<|channel|>": CONTROL}


def test_answers_end_with_them(tmp_path: Path) -> None:
    def describe(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(50)

    opened = open_model(
        str(write("qwen3_moe", tmp_path / "model.gguf", every("Q8_0"), describe=describe))
    )
    assert opened.model.generation_config.eos_token_id == [2, 50]
    assert opened.config.eos_token_id == 2  # as before, so that a model keeps its fingerprint
    assert opened.tokenizer.decode([99, 50], skip_special_tokens=True) == opened.tokenizer.decode(
        [99]
    )
