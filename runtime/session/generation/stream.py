"""Text as it is generated, and the effort that the answer took."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from runtime.control.counters import by_layer, hit_rate, totals
from runtime.session.generation.charges import Charge
from runtime.session.generation.detokenise import Detokeniser
from runtime.session.generation.sampling import Token, TokenTiming


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


class Stream:
    """Text as it is generated: iterate over its pieces, some of which are empty, or call `answer`
    for all of it."""

    def __init__(
        self,
        generate: Callable[..., Iterator[Token]],
        *,
        tokenizer: PreTrainedTokenizerBase,
        effort: Effort,
        receipt: Callable[[], dict[str, object]],
    ) -> None:
        """`generate` starts the generation, and calls its argument `told` with the effort at the
        end; until then the effort is `effort`."""
        self._tokenizer = tokenizer
        self._receipt = receipt
        self._so_far = _SoFar(effort)
        self._pieces = _pieces(generate, tokenizer, self._so_far)

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop the generation; `answer` then returns the text generated so far."""
        self._pieces.close()

    def answer(self) -> Answer:
        """Generate the rest, and return all of it. Raises BadInput for a prompt that the model
        cannot take."""
        for _ in self._pieces:
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


def _pieces(
    generate: Callable[..., Iterator[Token]], tokenizer: PreTrainedTokenizerBase, so_far: _SoFar
) -> Generator[str, None, None]:
    text = Detokeniser(tokenizer)
    for token in generate(told=so_far.end):
        so_far.timing.seconds.append(token.seconds)
        so_far.token_ids.append(token.token_id)
        yield text.add(token.token_id)
    yield text.rest()
