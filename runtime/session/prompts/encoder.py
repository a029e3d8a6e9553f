"""Prompts as tokens: texts, and chats by the model's template. A text that cannot fit into the
positions of the model is refused before it is encoded."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from artifacts.errors import BadInput
from runtime.model.open import MoeModel
from runtime.session.generation.grammar.thoughts import Thoughts
from runtime.session.generation.sampling import TooLong, num_positions
from runtime.session.prompts.chat_prompt import NO_THOUGHTS, ChatPrompt, Turn
from runtime.session.prompts.chat_template import ChatTemplates, template_of
from runtime.session.replies.form import PLAIN, ReplyForm, form_of
from runtime.session.replies.registry import REASONING, WHOLE, kind_of

# a text, or a chat, which may be its messages alone
Prompt = str | Sequence[Turn] | ChatPrompt
_NO_TEMPLATE = "the tokenizer has no chat template: turns are separated by blank lines"
_KEEPS = (
    "ByteLevel",
    "Digits",
    "Metaspace",
    "Prepend",
    "Lowercase",
    "NFD",
    "NFKD",
)  # remove no character
# A composed character is four code points at most when it is decomposed (Unicode Standard Annex
# 15).
_COMPOSES = ("NFC", "NFKC")
_PARTS = 4
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids [1, S] int64 of a prompt, and the form of a reply to it. Where a grammar holds the
    reply, `thoughts` may come before."""

    ids: torch.Tensor
    form: ReplyForm = PLAIN
    thoughts: Thoughts | None = None


class PromptEncoder:
    """Encodes prompts for one model; `close` ends the process of its chat template. `fallbacks` is
    the receipt's."""

    def __init__(self, opened: MoeModel, *, fallbacks: list[str]) -> None:
        self._opened = opened
        self._fallbacks = fallbacks
        self._templates = ChatTemplates()
        self.close: Callable[[], None] = self._templates.close

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Encode a text, or a chat by the tokenizer's template, which also tells the form of the
        reply. Without a template the turns are separated by blank lines, and a line is added to
        `fallbacks`, once. Raises BadInput, and TooLong as `check` does."""
        if self._opened.tokenizer is None:
            raise BadInput("the checkpoint has no tokenizer: put tokenizer.json beside it")
        if isinstance(prompt, str):
            return EncodedPrompt(self._ids(prompt))
        chat = prompt if isinstance(prompt, ChatPrompt) else ChatPrompt(prompt)
        if self._opened.tokenizer.chat_template:
            return self._by_template(chat)
        if chat.tools:
            raise BadInput("the model has no chat template, and so no way to call tools: give none")
        if _NO_TEMPLATE not in self._fallbacks:
            self._fallbacks.append(_NO_TEMPLATE)
        texts = [(turn["content"] or "").strip() for turn in chat.turns]
        return EncodedPrompt(self._ids("\n\n".join(texts) + "\n\n"))

    def _by_template(self, chat: ChatPrompt) -> EncodedPrompt:
        tokenizer = self._opened.tokenizer
        is_held = chat.must_call or chat.is_formed
        template = template_of(tokenizer, chat)
        marks = self._marks(template) if is_held else None
        if is_held and not marks:  # a grammar could not tell where thoughts end
            chat = replace(chat, options=NO_THOUGHTS | dict(chat.options))
        rendered = self._templates.render(tokenizer, chat)
        form = form_of(
            template,
            prompt_end=rendered,
            tools=chat.tools,
            max_calls=chat.max_calls,
            must_call=chat.must_call,
            is_formed=chat.is_formed,
        )
        ids = self._ids(rendered, add_special_tokens=False)  # the template has written them
        thoughts = _thoughts(rendered.rstrip(), marks) if marks else None
        if is_held and not thoughts:
            form = form.without(REASONING)
        return EncodedPrompt(ids, form, thoughts)

    def _marks(self, template: str) -> dict[str, int] | None:
        """Return the marks that begin and end the reasoning of a model with this template, with
        their tokens; None where it has none, or one is not a token."""
        kind = None if kind_of(template, WHOLE) else kind_of(template, REASONING)
        marks = kind.markers if kind else ()
        ids = {mark: self._ids(mark, add_special_tokens=False)[0].tolist() for mark in marks}
        is_token = bool(ids) and all(len(one) == 1 for one in ids.values())
        return {mark: one[0] for mark, one in ids.items()} if is_token else None

    def check(self, text: str) -> None:
        """Raise TooLong for a text that cannot fit into the model's positions, without encoding
        it."""
        longest = num_positions(self._opened.model)
        # A token for each character is what the shortest bound allows; it takes time to find a
        # better one.
        if longest and len(text) > longest and self._bound and self._bound.is_exceeded(text):
            raise TooLong(
                f"{len(text)} characters of prompt exceed the model's {longest} positions: give "
                "fewer"
            )

    @cached_property
    def _bound(self) -> "TextBound | None":
        return text_bound(self._opened.tokenizer, num_positions(self._opened.model))

    def _ids(self, text: str, **options: bool) -> torch.Tensor:
        self.check(text)
        try:
            text.encode()
        except UnicodeEncodeError:  # how Python decodes bytes that are not UTF-8
            raise BadInput("the prompt is not text in UTF-8: convert it") from None
        ids = (
            self._opened.tokenizer(text, return_tensors="pt", **options).input_ids
            if text
            else torch.zeros(1, 0)
        )
        return ids.to(torch.int64)


def _thoughts(prompt: str, marks: Mapping[str, int]) -> Thoughts | None:
    """Return the thoughts that may follow a prompt; None where it has ended them."""
    (opening, begin), (closing, end) = marks.items()
    if prompt.endswith(closing):
        return None
    return Thoughts(None if prompt.endswith(opening) else begin, end)


@dataclass(frozen=True, slots=True)
class TextBound:
    """A text of more than `num_characters` has more tokens than the model has positions; with
    `drops_spaces` a token may take any number of spaces, so that only the other characters
    count."""

    num_characters: int
    drops_spaces: bool

    def is_exceeded(self, text: str) -> bool:
        """Return whether the text cannot fit."""
        if len(text) <= self.num_characters:
            return False
        return not self.drops_spaces or len("".join(text.split())) > self.num_characters


def text_bound(tokenizer: PreTrainedTokenizerBase, num_positions: int) -> TextBound | None:
    """Return the bound of a tokenizer whose tokens each stand for a limited number of characters,
    those of its longest token. None for any other tokenizer: it may drop characters, or take any
    number of unknown ones for one token."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        return None
    try:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception:  # tokenizers has no other for a step in Python
        return None
    steps = list(_steps(state["normalizer"])) + list(_steps(state["pre_tokenizer"]))
    vocabulary = tokenizer.get_vocab()
    if not (
        all(map(_keeps_text, steps)) and _knows_every_character(state["model"], steps, vocabulary)
    ):
        return None
    per_character = _PARTS if any(step["type"] in _COMPOSES for step in steps) else 1
    drops_spaces = any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])
    return TextBound(max(map(len, vocabulary)) * per_character * num_positions, drops_spaces)


def _steps(step: dict | None) -> Iterator[dict]:
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for inner in step.get("normalizers") or step.get("pretokenizers") or ():
        yield from _steps(inner)


def _keeps_text(step: dict) -> bool:
    """Return whether a step of the tokenizer leaves at least a quarter of the characters of any
    text."""
    match step["type"]:
        case "Split" | "Punctuation":
            return step["behavior"] != "Removed"
        case "Replace":
            return len(step["content"]) >= len(step["pattern"].get("String", step["content"] + "x"))
        case kind:
            return kind in _KEEPS + _COMPOSES


def _knows_every_character(model: dict, steps: list[dict], vocabulary: dict[str, int]) -> bool:
    """Return whether no token stands for a run of unknown characters."""
    if model["type"] not in ("BPE", "Unigram"):
        return False
    if model.get("byte_fallback") and vocabulary.keys() >= _BYTES:
        return True
    if any(step["type"] == "ByteLevel" for step in steps):
        return vocabulary.keys() >= set(ByteLevel.alphabet())
    return model["type"] == "BPE" and model["unk_token"] is not None and not model["fuse_unk"]
