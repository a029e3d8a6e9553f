"""Text in, text out: a prompt or a chat through a session, as it comes, and what that took."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from artifacts.errors import BadInput, first_line
from runtime.control.counters import hit_rate
from runtime.session.detokenise import Text
from runtime.session.generate import Timing, Token

Prompt = str | Sequence[Mapping[str, str]]  # a text, or the turns of a chat, each with a role and its content
_NO_TEMPLATE = "the tokenizer has no chat template: turns are separated by blank lines"


@dataclass(frozen=True, slots=True)
class Effort:
    """What a stretch of passes took of the cache and the link: counters in all and layer by layer, and milliseconds
    for which compute waited."""

    counters: dict[str, int]
    by_layer: list[dict[str, int]]
    exposed_ms: float

    @property
    def hit_rate(self) -> float:
        """Hits over requests; 0 when nothing was requested."""
        return hit_rate(self.counters)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was generated, what it took, and what was in force. Times are milliseconds: to the first token, and per
    token after it."""

    token_ids: list[int]
    text: str
    effort: Effort
    ttft_ms: float
    tpot_ms: float
    receipt: dict[str, object]


class Stream:
    """Text as it is generated: iterate for its pieces, of which some are empty; `answer` for all of it."""

    def __init__(
        self,
        generate: Callable[..., Iterator[Token]],
        *,
        tokenizer: PreTrainedTokenizerBase,
        effort: Effort,
        receipt: Callable[[], dict[str, object]],
    ) -> None:
        """`generate` starts the generation, and calls its argument `told` with the effort at the end; until then the
        effort is `effort`."""
        self._tokenizer, self._receipt, self._so_far = tokenizer, receipt, _SoFar(effort)
        self._pieces = _pieces(generate, tokenizer, self._so_far)

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Generate no further; `answer` tells what came until then."""
        self._pieces.close()

    def answer(self) -> Answer:
        """All of it, once the rest has been generated. Raises BadInput for a prompt that the model cannot take."""
        for _ in self._pieces:
            pass
        so_far, timing = self._so_far, self._so_far.timing
        text = self._tokenizer.decode(so_far.token_ids, skip_special_tokens=True)
        return Answer(so_far.token_ids, text, so_far.effort, timing.ttft_ms, timing.tpot_ms, self._receipt())


@dataclass(slots=True)
class _SoFar:
    """Apart from the stream, so that nothing it holds holds it: one that is dropped half-way ends at once."""

    effort: Effort
    token_ids: list[int] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)

    def end(self, effort: Effort) -> None:
        self.effort = effort


def _pieces(
    generate: Callable[..., Iterator[Token]], tokenizer: PreTrainedTokenizerBase, so_far: _SoFar
) -> Generator[str, None, None]:
    text = Text(tokenizer)
    for token in generate(told=so_far.end):
        so_far.timing.seconds.append(token.seconds)
        so_far.token_ids.append(token.token_id)
        yield text.add(token.token_id)
    yield text.rest()


def encode(tokenizer: PreTrainedTokenizerBase | None, prompt: Prompt, *, fallbacks: list[str]) -> torch.Tensor:
    """Token ids [1, S] int64; of a chat by the tokenizer's template. Without a template the turns are separated by
    blank lines, and a line is added to `fallbacks`, once. Raises BadInput."""
    if tokenizer is None:
        raise BadInput("the checkpoint has no tokenizer: put tokenizer.json beside it")
    if isinstance(prompt, str):
        return _encode(tokenizer, prompt)
    if tokenizer.chat_template:
        return _by_template(tokenizer, prompt)
    if _NO_TEMPLATE not in fallbacks:
        fallbacks.append(_NO_TEMPLATE)
    return _encode(tokenizer, "\n\n".join(turn["content"].strip() for turn in prompt) + "\n\n")


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> torch.Tensor:
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # Python's sign for bytes that are not UTF-8
        raise BadInput("the prompt is not text in UTF-8: convert it")
    ids = tokenizer(prompt, return_tensors="pt").input_ids if prompt else torch.zeros(1, 0)
    return ids.to(torch.int64)


def _by_template(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, str]]) -> torch.Tensor:
    asked = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    try:
        return tokenizer.apply_chat_template(list(turns), **asked)["input_ids"]
    except Exception as error:  # a template is a program, and the model's: whatever it does, that is what is wrong
        raise BadInput(
            f"the model's chat template cannot be used ({first_line(error)}): give --prompt instead"
        ) from error
