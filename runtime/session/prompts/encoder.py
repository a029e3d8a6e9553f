"""Prompts as tokens: texts, and chats by the model's template."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch

from artifacts.errors import BadInput
from runtime.model.open import MoeModel
from runtime.session.generation.sampling import TooLong, num_positions
from runtime.session.prompts.chat_template import ChatTemplates
from runtime.session.prompts.text_bound import TextBound, text_bound

# a text, or the messages of a chat, each with `role` and `content`
Prompt = str | Sequence[Mapping[str, str]]
_NO_TEMPLATE = "the tokenizer has no chat template: turns are separated by blank lines"


class PromptEncoder:
    """Encodes prompts for one model; `close` ends the process of its chat template. `fallbacks` is
    the receipt's."""

    def __init__(self, opened: MoeModel, *, fallbacks: list[str]) -> None:
        self._opened = opened
        self._fallbacks = fallbacks
        self._templates = ChatTemplates()
        self.close: Callable[[], None] = self._templates.close

    def encode(self, prompt: Prompt) -> torch.Tensor:
        """Token ids [1, S] int64; of a chat by the tokenizer's template. Without a template the
        turns are separated by blank lines, and a line is added to `fallbacks`, once. Raises
        BadInput, and TooLong as `check` does."""
        if self._opened.tokenizer is None:
            raise BadInput("the checkpoint has no tokenizer: put tokenizer.json beside it")
        if isinstance(prompt, str):
            return self._ids(prompt)
        if self._opened.tokenizer.chat_template:
            rendered = self._templates.render(self._opened.tokenizer, prompt)
            return self._ids(rendered, add_special_tokens=False)  # the template has written them
        if _NO_TEMPLATE not in self._fallbacks:
            self._fallbacks.append(_NO_TEMPLATE)
        return self._ids("\n\n".join(turn["content"].strip() for turn in prompt) + "\n\n")

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
    def _bound(self) -> TextBound | None:
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
