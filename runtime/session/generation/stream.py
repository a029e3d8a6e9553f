"""Tokens and text as they are generated, and the effort that the answer took."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from runtime.control.counters import by_layer, hit_rate, totals
from runtime.session.generation.charges import Charge
from runtime.session.generation.logprobs import Logprobs
from runtime.session.replies.form import PLAIN, ReplyForm
from runtime.session.replies.pieces import Piece

_UNFINISHED = "�"  # what an incomplete character decodes to


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; `index` counts from 0, `seconds` from the call that gave the prompt,
    without the time that the reader of the tokens took. `logprobs` are there if they were asked
    for."""

    token_id: int
    index: int
    seconds: float
    logprobs: Logprobs | None = None


@dataclass(slots=True)
class TokenTiming:
    """Time to first token and mean time per token after it, in milliseconds."""

    seconds: list[float] = field(default_factory=list)  # of each token, since the prompt was given

    @property
    def ttft_ms(self) -> float:
        return self.seconds[0] * 1e3 if self.seconds else 0.0

    @property
    def tpot_ms(self) -> float:
        later = len(self.seconds) - 1
        return (self.seconds[-1] - self.seconds[0]) * 1e3 / later if later > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Effort:
    """Counters of some passes, in total and by layer, and the exposed stall in milliseconds."""

    counters: dict[str, int]
    by_layer: list[dict[str, int]]
    exposed_ms: float

    @classmethod
    def of(cls, charge: Charge) -> "Effort":
        """Return the effort of whole passes."""
        layers = by_layer(charge.counters)
        return cls(totals(layers), layers, charge.exposed_s * 1e3)

    @property
    def hit_rate(self) -> float:
        """Hits over requests; 0 without requests."""
        return hit_rate(self.counters)


@dataclass(frozen=True, slots=True)
class Answer:
    """The generated text, its effort and its receipt; `ttft_ms` is the time to the first token,
    `tpot_ms` the mean time per token after it."""

    token_ids: list[int]
    text: str
    effort: Effort
    ttft_ms: float
    tpot_ms: float
    receipt: dict[str, object]

    def row(self) -> dict[str, object]:
        """Return the answer as a row of a table."""
        return {
            "text": self.text,
            "tokens": len(self.token_ids),
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "hit_rate": self.effort.hit_rate,
        }


class Stream:
    """Text as it is generated: iterate over its pieces, some of which are empty, or call `answer`
    for all of it."""

    def __init__(
        self,
        generate: Callable[..., Iterator[Token]],
        *,
        tokenizer: PreTrainedTokenizerBase,
        form: ReplyForm = PLAIN,
        effort: Effort,
        receipt: Callable[[], dict[str, object]],
    ) -> None:
        """`generate` starts the generation, and calls its argument `on_end` with the effort at the
        end; until then the effort is `effort`. `form` is that of the reply."""
        self._tokenizer = tokenizer
        self._form = form
        self._receipt = receipt
        self._so_far = _SoFar(effort)
        self._tokens = _tokens(generate, self._so_far)
        self._texts = _texts(self._tokens, tokenizer)

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> str:
        return next(self._texts)

    def pieces(self) -> Iterator[Piece]:
        """Iterate over the reply taken apart, in place of its text: what the model thinks, what it
        says, and the tools that it calls. None is empty."""
        text = Detokeniser(self._tokenizer, keeps=self._form.markers)
        parser = self._form.parser()
        for token_id in self._tokens:
            yield from parser.add(text.add(token_id))
        yield from parser.add(text.rest())
        yield from parser.rest()

    def close(self) -> None:
        """Stop the generation; `answer` then returns the text generated so far."""
        self._tokens.close()

    def answer(self) -> Answer:
        """Generate the rest, and return all of it. Raises BadInput for a prompt that the model
        cannot take."""
        for _ in self._tokens:
            pass
        so_far = self._so_far
        timing = self._so_far.timing
        text = self._tokenizer.decode(so_far.token_ids, skip_special_tokens=True)
        return Answer(
            so_far.token_ids, text, so_far.effort, timing.ttft_ms, timing.tpot_ms, self._receipt()
        )


@dataclass(slots=True)
class _SoFar:
    """State of a stream so far: its effort, tokens and timing. The generator refers to this object
    and not to the stream. A stream that is dropped half-way is therefore freed at once, with the
    keys and values of its generation."""

    effort: Effort
    token_ids: list[int] = field(default_factory=list)
    timing: TokenTiming = field(default_factory=TokenTiming)

    def end(self, effort: Effort) -> None:
        self.effort = effort


def _tokens(generate: Callable[..., Iterator[Token]], so_far: _SoFar) -> Generator[int, None, None]:
    for token in generate(on_end=so_far.end):
        so_far.timing.seconds.append(token.seconds)
        so_far.token_ids.append(token.token_id)
        yield token.token_id


def _texts(tokens: Iterator[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    text = Detokeniser(tokenizer)
    for token_id in tokens:
        yield text.add(token_id)
    yield text.rest()


class Detokeniser:
    """Decodes each token together with those just before it, as tokenizers join words by their
    neighbours. Special tokens are left out, but for those whose text is in `keeps`."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, keeps: frozenset[str] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder if keeps else {}
        self._kept = {token: one.content for token, one in added.items() if one.content in keeps}
        self._ids: list[int] = []  # those returned last, and those whose text is not returned yet
        self._num_returned = 0

    def add(self, token_id: int) -> str:
        """The text that the token completes; empty while a character is incomplete."""
        if token_id in self._kept:
            before = self.rest()
            self._ids = []
            self._num_returned = 0
            return before + self._kept[token_id]
        self._ids.append(token_id)
        more = self._more()
        if not more or more.endswith(_UNFINISHED):
            return ""
        self._ids = self._ids[self._num_returned :]
        self._num_returned = len(self._ids)
        return more

    def rest(self) -> str:
        """The text not returned yet, when no token follows."""
        return self._more()

    def _more(self) -> str:
        returned = self._decoded(self._ids[: self._num_returned])
        return self._decoded(self._ids)[len(returned) :]

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class Stops:
    """Passes text on up to the first occurrence of one of `stops`, which `met` then is; holds back
    text with which one may begin."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.met: str | None = None
        self.num_cut = 0  # characters from the stop on, once it is met
        self._stops = stops
        self._held = ""

    @property
    def is_met(self) -> bool:
        return self.met is not None

    def add(self, text: str) -> str:
        """The text that certainly belongs to the answer."""
        held = self._held + text
        starts = {stop: start for stop in self._stops if (start := held.find(stop)) >= 0}
        if starts:
            self.met = min(starts, key=starts.__getitem__)
            self._held = ""
            self.num_cut = len(held) - starts[self.met]
            return held[: starts[self.met]]
        num_held = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - num_held :]
        return held[: len(held) - num_held]

    @property
    def num_held(self) -> int:
        """Number of the last characters that were not passed on."""
        return self.num_cut + len(self._held)

    def rest(self) -> str:
        """Take out the text held back, when no text follows."""
        held = self._held
        self._held = ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The number of characters at the end of `text` with which `stop` may begin."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
