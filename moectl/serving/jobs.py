"""Jobs for the thread that runs the model, and the events it sends back."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from runtime.control.counters import Counter
from runtime.drafters.base import MOST
from runtime.session.generation.charges import Charge
from runtime.session.generation.sampling import Sampling
from runtime.session.prompts.encoder import Prompt
from runtime.session.replies.form import PLAIN, ReplyForm
from runtime.session.replies.pieces import Piece


@dataclass(frozen=True, slots=True)
class Encoded:
    """The prompt of a request as token ids [1, S] int64, the sampling with the number of tokens
    that have room, and the form of its reply."""

    ids: torch.Tensor
    sampling: Sampling
    form: ReplyForm = PLAIN


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an answer: `reason` is `stop`, `length` or `tool_calls`, `took` holds its counters
    and times; `num_cached` tokens of its prompt were known from earlier ones; `stop` is the one of
    the request's stops that ended it; `num_reasoning` of its tokens are reasoning. Of
    `num_drafted` drafts `num_accepted` were accepted."""

    reason: str
    num_tokens: int
    took: dict[str, object]
    num_cached: int = 0
    stop: str | None = None
    num_reasoning: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed, maybe after some text; `status` is an HTTP status, `code` one of OpenAI's
    API."""

    message: str
    status: int
    code: str | None = None


@dataclass(frozen=True, slots=True)
class LoggedToken:
    """A token by its bytes, with its log probability and the most probable ones in its place."""

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True, slots=True)
class LoggedTokens:
    """The tokens of the text that follows."""

    tokens: tuple[LoggedToken, ...]


@dataclass(frozen=True, slots=True)
class TokenCost:
    """The cost of one token, by layer: experts that were there, that were on their way, and that
    were missing, which are fractions for a shared pass; and the milliseconds that it waited for the
    link. The first token costs its prompt too. Text that the token completes is told before."""

    token_id: int
    hits: list[float]
    late: list[float]
    misses: list[float]
    stall_ms: float

    @classmethod
    def of(cls, token_id: int, charge: Charge) -> "TokenCost":
        kinds = (Counter.HITS, Counter.LATE, Counter.MISSES)
        by_layer = (charge.counters[kind].round(3).tolist() for kind in kinds)
        return cls(token_id, *by_layer, round(charge.exposed_s * 1e3, 3))


Event = Encoded | Piece | LoggedTokens | TokenCost | Done | Failed


@dataclass(slots=True, eq=False)
class GenerationJob:
    """A prompt to continue: a text, a chat or token ids [1, S]. Without `max_tokens` the answer has
    as many as have room, and with `may_be_less` as many of these; `sampling` holds the rest. `tell`
    is called on a thread of the scheduler, with Encoded or Failed first. What it takes is counted
    for `owner`, and told `by_token` if asked for. A pass has at most `most_drafts` of its drafts.
    `like` is an earlier job that differs in its seed only: its prompt is not encoded again."""

    prompt: Prompt | torch.Tensor
    max_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    tell: Callable[[Event], None]
    owner: str = ""
    by_token: bool = False
    most_drafts: int = MOST
    like: "GenerationJob | None" = None
    may_be_less: bool = False
    encoded: Encoded | None = None
    arrived_s: float = field(default_factory=time.perf_counter)
    has_left: bool = False  # the client has disconnected

    @property
    def is_ready(self) -> bool:
        """True if the job can begin as soon as it is its turn."""
        return self.encoded is not None


@dataclass(slots=True, eq=False)
class Switch:
    """A switch to another preset after the earlier requests; `settled` gets None, or the error that
    prevents it."""

    preset: str
    settled: Future[None] = field(default_factory=Future)
    is_ready: ClassVar[bool] = True
