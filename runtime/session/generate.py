"""A stream of tokens: runs transformers' own generate() on a thread, and yields each token as it is
made, with its time."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from artifacts.errors import BadInput, BadUsage
from artifacts.routing.coactivation import NotFiniteWeights
from runtime.session.finite import FiniteLogits, NotFinite

TakeTurn = Callable[[threading.Event], AbstractContextManager[bool]]
"""Waits for the turn of a generation, or until the event is set; yields whether the generation may
begin."""

_END = object()
# bounds of divisors of logits: with larger or smaller ones logits are no longer finite
_LEAST = 1e-4
_MOST = 1e4
_NO_PROBABILITY = "probability tensor contains either"  # as torch.multinomial begins
NOTHING_TO_DRAW = (
    "the options of the request and of the model's generation_config.json leave no token to draw"
)
_NO_END = {"stop_strings": None, "exponential_decay_length_penalty": None}  # other ends of a text


class TooLong(BadInput):
    """A prompt that has no room in the model's positions, with the tokens that are to follow it."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options for drawing the next token; `temperature` 0 takes the most probable one. Without a
    `repetition_penalty`, the one of the model's generation_config.json holds. Raises BadUsage for a
    value out of range."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float | None = None
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise BadUsage(f"max-new-tokens must be at least 1, not {self.max_new_tokens}")
        is_sound = 0 < self.top_p <= 1 and self.top_k >= 0
        is_sound &= self.temperature == 0 or _LEAST <= self.temperature <= _MOST
        if not (
            is_sound
            and (self.repetition_penalty is None or _LEAST <= self.repetition_penalty <= _MOST)
        ):
            raise BadUsage(
                "sampling needs temperature >= 0, 0 < top-p <= 1, top-k >= 0 and "
                f"repetition-penalty > 0, neither beyond {_LEAST:g} and {_MOST:g}"
            )

    def options(self) -> dict[str, object]:
        """Return the keyword arguments of generate(), which take precedence over the model's
        generation settings."""
        options: dict[str, object] = {"max_new_tokens": self.max_new_tokens}
        if self.repetition_penalty is not None:
            options["repetition_penalty"] = float(self.repetition_penalty)
        if self.ignore_eos:
            options |= {"min_new_tokens": self.max_new_tokens} | _NO_END
        if not self.temperature:
            return options | {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        return options | {
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; `index` counts from 0, `seconds` from the call of `stream`."""

    token_id: int
    index: int
    seconds: float


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


def stream(
    model: PreTrainedModel,
    prompt: torch.Tensor,
    sampling: Sampling,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    turn: TakeTurn = lambda stop: nullcontext(True),
) -> Iterator[Token]:
    """Generate from `prompt` [1, S] int64 once `turn` is there; `tokenizer` finds texts that end
    the generation. Closing the iterator stops it; an error in it is raised here. Raises BadInput
    for a prompt that the model cannot take, NotFinite for logits that are no numbers."""
    check_prompt(model, prompt, sampling.max_new_tokens)
    tokens: queue.SimpleQueue = queue.SimpleQueue()
    stop = threading.Event()
    start_s = time.perf_counter()
    arguments = (
        model,
        prompt,
        sampling,
        tokenizer,
        tokens,
        stop,
        turn,
        start_s,
        torch.get_num_threads(),
    )
    worker = threading.Thread(target=_generate, args=arguments, name="moectl-generate", daemon=True)
    try:
        worker.start()
        while (item := tokens.get()) is not _END:
            if isinstance(item, NotFiniteWeights):
                item = NotFinite(prompt, model.dtype)
            if isinstance(item, BaseException):
                try:
                    raise item
                finally:
                    # its traceback refers to this frame, and to those that hold keys and values
                    del item
            yield item
    finally:
        stop.set()
        if worker.ident is not None:
            worker.join()
        # an unread error would refer to its frames, and these to the queue
        while not tokens.empty():
            tokens.get()


def check_prompt(model: PreTrainedModel, prompt: torch.Tensor, num_new: int) -> None:
    """Raise BadInput for a prompt [1, S] that is empty or of unknown tokens, TooLong where
    `num_new` tokens after it have no room."""
    if prompt.numel() == 0:
        raise BadInput("the prompt is empty: give at least one token of text")
    what = f"{prompt.shape[1]} prompt tokens and {num_new} new ones"
    check_tokens(model, highest=int(prompt.max()), length=prompt.shape[1] + num_new, what=what)


def check_tokens(model: PreTrainedModel, *, highest: int, length: int, what: str) -> None:
    """Raise BadInput if token id `highest` is outside the model's vocabulary, TooLong if `length`
    tokens, which the error calls `what`, are more than its positions."""
    vocabulary = model.get_input_embeddings().num_embeddings
    if highest >= vocabulary:
        raise BadInput(
            f"token {highest} is outside the vocabulary of {vocabulary}: the tokenizer is another "
            "model's"
        )
    longest = num_positions(model)
    if longest and length > longest:
        raise TooLong(f"{what} exceed the model's {longest} positions: give fewer")


def num_positions(model: PreTrainedModel) -> int | None:
    """Return the largest number of tokens that a prompt and its answer may have together, None
    where the model's configuration names no limit."""
    return getattr(model.config, "max_position_embeddings", None)


def says_nothing_to_draw(error: RuntimeError) -> bool:
    """Return whether this is torch's error for finding no token with a probability."""
    return _NO_PROBABILITY in str(error)


def _generate(
    model: PreTrainedModel,
    prompt: torch.Tensor,
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase | None,
    tokens: queue.SimpleQueue,
    stop: threading.Event,
    turn: TakeTurn,
    start_s: float,
    num_threads: int,
) -> None:
    # a new thread has torch's default number, with which products round differently
    torch.set_num_threads(num_threads)
    try:
        with turn(stop) as may_begin, torch.random.fork_rng(devices=_cuda_devices(prompt)):
            if not may_begin:
                return
            torch.manual_seed(sampling.seed)
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                streamer=_Streamer(tokens, start_s),
                logits_processor=LogitsProcessorList([FiniteLogits(model.dtype)]),
                stopping_criteria=StoppingCriteriaList([_Stopped(stop)]),
                tokenizer=tokenizer,
                **sampling.options(),
            )
    except RuntimeError as error:  # `stream` raises errors from the queue
        tokens.put(BadInput(NOTHING_TO_DRAW) if says_nothing_to_draw(error) else error)
    except BaseException as error:
        tokens.put(error)
    finally:
        tokens.put(_END)


def _cuda_devices(tensor: torch.Tensor) -> list[torch.device]:
    return [tensor.device] if tensor.device.type == "cuda" else []


class _Streamer(BaseStreamer):
    def __init__(self, tokens: queue.SimpleQueue, start_s: float) -> None:
        self._tokens = tokens
        self._start_s = start_s
        self._index = -1

    def put(self, value: torch.Tensor) -> None:
        if self._index < 0:  # the prompt comes first
            self._index = 0
            return
        for token_id in value.reshape(-1).tolist():
            self._tokens.put(Token(token_id, self._index, time.perf_counter() - self._start_s))
            self._index += 1

    def end(self) -> None:
        """Do nothing: `_generate` marks the end of the queue, after an error too."""


class _Stopped(StoppingCriteria):
    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        return torch.full(
            (input_ids.shape[0],), self._stop.is_set(), dtype=torch.bool, device=input_ids.device
        )
