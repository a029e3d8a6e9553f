"""The bound of a text: no text that fits is beyond it, and texts that cannot fit are."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from artifacts.errors import BadInput
from moectl.bundled import demo_model
from runtime import Session, Settings
from runtime.model.open import MoeModel, open_model
from runtime.session.generation.sampling import TooLong
from runtime.session.prompts.encoder import Prompt, TextBound, text_bound
from tests.conftest import Checkpoint

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["<unk>", "▁", "a", "b", "ab", "▁ab", "ba", "c", "é", "가"]
MERGES = [("a", "b"), ("▁", "ab"), ("b", "a")]


def pairs(normalizer=None, *, words=WORDS, **options) -> Tokenizer:
    made = Tokenizer(
        models.BPE({word: number for number, word in enumerate(words)}, MERGES, **options)
    )
    made.normalizer = normalizer or normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return made


def spaces(made: Tokenizer) -> Tokenizer:
    made.add_special_tokens([AddedToken("<|a|>", lstrip=True, rstrip=True)])
    return made


def before(made: Tokenizer, pre_tokenizer: object) -> Tokenizer:
    made.pre_tokenizer = pre_tokenizer
    return made


FALLBACK = {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True, "words": WORDS + BYTES}
BOUNDED = {
    "bytes": AutoTokenizer.from_pretrained(demo_model()).backend_tokenizer,
    "byte fallback": pairs(**FALLBACK),
    "unknown ones one by one": pairs(unk_token="<unk>"),
    "composed": pairs(normalizers.NFKC(), unk_token="<unk>"),
    "spaces go": spaces(pairs(**FALLBACK)),
    "split": before(pairs(**FALLBACK), pre_tokenizers.Split("a", "isolated")),
}
UNBOUNDED = {
    "unknown ones together": pairs(unk_token="<unk>", fuse_unk=True),
    "unknown ones dropped": pairs(),
    "some bytes": pairs(**FALLBACK | {"words": WORDS + BYTES[1:]}),
    "words": Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    "shortened": pairs(normalizers.Replace("aa", "a"), **FALLBACK),
    "pattern": pairs(normalizers.StripAccents(), **FALLBACK),
    "removed": before(pairs(**FALLBACK), pre_tokenizers.Split("a", "removed")),
    "few bytes": before(pairs(), pre_tokenizers.ByteLevel()),
}


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=60)
@given(
    text=st.text(
        st.sampled_from("ab cé가日\u1100\u1161\u0301\n") | st.characters(exclude_categories=["Cs"])
    )
)
def test_what_fits_is_not_beyond_it(name: str, text: str) -> None:
    text = text + "<|a|>" + 99 * " " + text * 3
    num_tokens = len(BOUNDED[name].encode(text, add_special_tokens=False).ids)
    bound = text_bound(PreTrainedTokenizerFast(tokenizer_object=BOUNDED[name]), num_tokens)
    assert bound and not bound.is_exceeded(text)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_tokenizer_that_drops_text_has_none(name: str) -> None:
    assert text_bound(PreTrainedTokenizerFast(tokenizer_object=UNBOUNDED[name]), 8) is None


def test_it_is_the_longest_token_for_each_position() -> None:
    bounds = {
        name: text_bound(PreTrainedTokenizerFast(tokenizer_object=made), 8)
        for name, made in BOUNDED.items()
    }
    assert bounds["byte fallback"] == TextBound(8 * 6, drops_spaces=False)
    assert bounds["composed"] == TextBound(8 * 5 * 4, drops_spaces=False)
    assert bounds["spaces go"] == TextBound(8 * 6, drops_spaces=True)
    assert bounds["bytes"].is_exceeded(" " * (8 * 33 + 1)) and not bounds["bytes"].is_exceeded(
        " " * 8 * 33
    )
    assert bounds["spaces go"].is_exceeded("a " * 49) and not bounds["spaces go"].is_exceeded(
        "a " * 48
    )
    assert text_bound(object(), 8) is None


# Of a session


@pytest.fixture(scope="module")
def opened(checkpoint: Checkpoint) -> MoeModel:
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    first = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = first
    return replace(open_model(str(checkpoint("olmoe"))), tokenizer=tokenizer)


@pytest.fixture
def session(opened: MoeModel) -> Iterator[Session]:
    with Session(opened, Settings(budget="25%", link="disk", window="0B")) as session:
        yield session


def test_a_session_does_not_encode_what_cannot_fit(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text, the turns of a chat, and what a template makes of them."""
    opened = session.opened
    longest = max(map(len, opened.tokenizer.get_vocab())) * opened.config.max_position_embeddings
    assert session.encode("a" * longest).shape[0] == 1
    encoded: list[int] = []
    monkeypatch.setattr(type(opened.tokenizer), "_encode_plus", lambda *_, **__: encoded.append(1))

    def refuse(prompt: Prompt, num_characters: int) -> None:
        with pytest.raises(
            TooLong, match=f"^{num_characters} characters of prompt exceed the model's .* positions"
        ):
            session.encode(prompt)

    turns = [{"role": "user", "content": "a" * longest}]
    refuse("a" * (longest + 1), longest + 1)
    refuse(turns, longest + len("\n\n"))
    monkeypatch.setattr(
        opened.tokenizer, "chat_template", "{% for _ in range(9999) %}sheep{% endfor %}"
    )
    refuse(turns, 5 * 9999)
    assert not encoded


def test_a_chat_is_encoded_as_transformers_encodes_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = session.opened.tokenizer
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    )
    turns = [
        {"role": "user", "content": "It was a dark"},
        {"role": "assistant", "content": " and stormy night"},
    ]
    expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert session.encode(turns).tolist() == [expected]
    with pytest.raises(BadInput, match="is not text in UTF-8"):
        session.encode([{"role": "user", "content": "\udc80"}])
