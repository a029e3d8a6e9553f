"""The tokens of a text are those of llama.cpp, for every kind of tokenizer and setting that is
read."""

import json
from importlib.util import find_spec
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from artifacts.errors import BadInput
from runtime.model.gguf.tokenizer import gguf_tokenizer
from runtime.session.prompts.encoder import text_bound
from tests.helpers.gguf_vocabularies import (
    CONTROL,
    TEXTS,
    byte_level,
    of_characters,
    sentencepiece,
    write_vocabulary,
)

BPE = byte_level()
DISTINCT = sentencepiece()
CHARACTERS = of_characters()
TIED = sentencepiece(distinct=False)
BOTH = {"add_bos_token": True, "add_eos_token": True, "bos_token_id": 1, "eos_token_id": 2}
SPACES = {"add_space_prefix": False, "remove_extra_whitespaces": True}
CASES = {
    "no name of splitting": (BPE, {}),
    "begin and end": (BPE, {"pre": "qwen2", **BOTH}),
    "whole words": (BPE, {"pre": "llama-bpe", "eos_token_id": 300}),
    "DeepSeek": (BPE, {"pre": "deepseek-llm", "add_space_prefix": True}),
    "no types": (BPE | {"types": None}, {"pre": "gpt-4o"}),
    "SentencePiece": (DISTINCT, {}),
    "SentencePiece, no space before": (DISTINCT, SPACES | {"add_bos_token": False}),
    "equal scores": (TIED, {"add_eos_token": True}),
    "of characters": (CHARACTERS, {"bos_token_id": 2, "add_bos_token": False, "pre": "gpt-2"}),
    "no scores": (DISTINCT | {"scores": None}, SPACES),
}


@pytest.mark.skipif(
    find_spec("xllamacpp") is None, reason="llama.cpp is not installed (extra: peers)"
)
@pytest.mark.parametrize(("vocabulary", "entries"), CASES.values(), ids=CASES)
def test_tokens_are_those_of_llama_cpp(tmp_path: Path, vocabulary: dict, entries: dict) -> None:
    import xllamacpp

    path = write_vocabulary(tmp_path / "model.gguf", **vocabulary, entries=entries)
    ours = gguf_tokenizer(path)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx = 64
    parameters.n_parallel = 1
    parameters.n_gpu_layers = 0
    parameters.verbosity = -1
    server = xllamacpp.Server(parameters)
    for text in TEXTS:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        asked = Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urlopen(asked) as answer:
            assert ours(text).input_ids == json.load(answer)["tokens"], text
    assert ours.unfollowed == ()


def test_a_space_that_is_put_before_is_not_shown(tmp_path: Path) -> None:
    for vocabulary in (DISTINCT, TIED):
        for entries in ({}, SPACES):
            tokenizer = gguf_tokenizer(
                write_vocabulary(tmp_path / "m.gguf", **vocabulary, entries=entries)
            )
            for text in ("hello  world", " 世界é\u0301😀"):
                assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_what_ends_an_answer_is_not_shown(tmp_path: Path) -> None:
    plain = BPE["tokens"].index("th")
    entries = {"pre": "qwen2", "eot_token_id": plain}
    tokenizer = gguf_tokenizer(write_vocabulary(tmp_path / "m.gguf", **BPE, entries=entries))
    ids = tokenizer("a<|im_end|>b<think>").input_ids
    assert tokenizer.decode([*ids, plain], skip_special_tokens=True) == "ab<think>"
    assert tokenizer.decode([*ids, plain]) == "a<|im_end|>b<think>th"
    assert plain in tokenizer("the").input_ids


def test_long_texts_are_bounded_but_for_steps_in_python(tmp_path: Path) -> None:
    bounds = [
        text_bound(gguf_tokenizer(write_vocabulary(tmp_path / "m.gguf", **each)), 8)
        for each in (DISTINCT, TIED)
    ]
    assert bounds[0].is_exceeded("a" * 1000) and bounds[1] is None


TOLD = {
    "a name that is not known": ({"pre": "zzz"}, "not as zzz"),
    "the name of the model": ({"pre": "qwen2", "general.name": "My Phi-3"}, "by the model's name"),
    "tokens that overlap": ({"pre": "qwen2", "more": ("ab<", "<bc")}, "overlap"),
    "a missing byte": ({"pre": "qwen2", "without": "ú"}, "lacks bytes"),
    "a merge to nothing": ({"pre": "qwen2", "without": "th"}, "or what merges join"),
}


@pytest.mark.parametrize(("entries", "line"), TOLD.values(), ids=TOLD)
def test_what_may_differ_is_told(tmp_path: Path, entries: dict, line: str) -> None:
    entries = dict(entries)
    vocabulary = byte_level(dict.fromkeys(entries.pop("more", ()), CONTROL))
    without = entries.pop("without", None)
    vocabulary["tokens"] = [
        token if token != without else "zz zz" for token in vocabulary["tokens"]
    ]
    told = gguf_tokenizer(
        write_vocabulary(tmp_path / "m.gguf", **vocabulary, entries=entries)
    ).unfollowed
    assert len(told) == 1 and line in told[0]


REFUSED = {
    "another kind": (BPE | {"kind": "t5"}, {}, "of the kind t5: moectl reads gpt2, llama, gemma4"),
    "of characters": (BPE, {"pre": "gemma4"}, "of the kind gemma4, which moectl does not read"),
    "no merges": (BPE | {"merges": None}, {"pre": "qwen2"}, "has no tokenizer.ggml.merges"),
    "a token twice": (
        BPE | {"tokens": [*BPE["tokens"][:-1], "!"]},
        {},
        "a vocabulary with a token twice",
    ),
    "few scores": (DISTINCT | {"scores": [0.0] * 9}, {}, "scores of 9 tokens"),
    "no token to begin with": (
        BPE,
        {"pre": "glm4", "add_bos_token": True},
        "add_bos_token, and no bos_token_id",
    ),
}


@pytest.mark.parametrize(("vocabulary", "entries", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_followed_is_refused(
    tmp_path: Path, vocabulary: dict, entries: dict, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        gguf_tokenizer(write_vocabulary(tmp_path / "m.gguf", **vocabulary, entries=entries))


def test_a_file_may_have_no_tokenizer(tmp_path: Path) -> None:
    assert gguf_tokenizer(write_vocabulary(tmp_path / "m.gguf", kind="none", tokens=["a"])) is None
