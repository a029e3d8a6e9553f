"""Requests that come and go: the requests of a trace served together, in passes of many rows.

In a closed loop each of N clients sends its next request when its last has been answered. A pass
computes one token of every answer in progress, and a chunk of the prompts that wait, first come,
first served. A router says the same of a token whatever is computed beside it: rows stay as they
were recorded, and are dealt to other passes.
"""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from artifacts.errors import BadUsage
from artifacts.traces.trace import PREFILL, Trace

CHUNK = 512  # tokens of prompts in a pass
_MOST_CLIENTS = 10_000


@dataclass(frozen=True, slots=True)
class Clients:
    """`count` clients, whose prompts are read at most `chunk` tokens a pass. All but the first are
    met at a token of their first answer that is drawn by `seed`, so that they do not run in step.
    Raises BadUsage."""

    count: int
    chunk: int = CHUNK
    seed: int = 0

    @property
    def shown(self) -> str:
        return f"{self.count} client" + "s at a time" * (self.count > 1)

    def __post_init__(self) -> None:
        if not 1 <= self.count <= _MOST_CLIENTS:
            raise BadUsage(f"--clients {self.count}: give 1 to {_MOST_CLIENTS:,}")
        if self.chunk < 1:
            raise BadUsage(
                f"--chunk {self.chunk}: a pass reads at least one token of the prompts that wait"
            )


def clients_of(count: int | None, chunk: int | None = None, *, seed: int = 0) -> Clients | None:
    """Return the clients that options name. Raises BadUsage."""
    if count is None and chunk is not None:
        raise BadUsage("--chunk is of many requests at a time: give --clients too")
    return None if count is None else Clients(count, CHUNK if chunk is None else chunk, seed)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Requests as clients were served. `trace` has one pass for all that was computed together; its
    R requests are numbered in the order in which they began.

    `arrived[n]` is the pass before which request n came, or -1 if it was met half-way. `answers`
    has the request and the pass of each token of an answer: decoded ones, and the first, which the
    end of the prompt gives.
    """

    trace: Trace
    arrived: np.ndarray  # [R] int64
    answers: np.ndarray  # [A, 2] int64
    num_repeated: int  # requests that were sent again, because the trace has too few

    def summary(self, ends_s: np.ndarray) -> dict[str, float | None]:
        """Return the median and the 95th percentile, over requests, of milliseconds to the first
        token and per token after it. Return also tokens per second over all passes, the reading of
        prompts included. `ends_s` [P] is when each pass ends. A value is None where no request
        shows it."""
        spread = {}
        for name, seconds in (
            ("ttft", self.first_token_s(ends_s)),
            ("tpot", self.each_token_s(ends_s)),
        ):
            for suffix, percent in (("ms", 50), ("p95_ms", 95)):
                value = float(np.percentile(seconds, percent)) * 1e3 if seconds.size else None
                spread[f"{name}_{suffix}"] = value
        return {**spread, "tokens_per_s": len(self.answers) / float(ends_s[-1])}

    def first_token_s(self, ends_s: np.ndarray) -> np.ndarray:
        """Return the seconds from arrival to the first token of each request that arrived and was
        answered."""
        request, first = np.unique(self.answers[:, 0], return_index=True)
        came = self.arrived[request]
        began_s = np.append(0.0, ends_s)[came]
        return (ends_s[self.answers[first, 1]] - began_s)[came >= 0]

    def each_token_s(self, ends_s: np.ndarray) -> np.ndarray:
        """Return the mean seconds between the tokens of each answer with two or more tokens
        seen."""
        _, request, counts = np.unique(self.answers[:, 0], return_inverse=True, return_counts=True)
        last_s = np.zeros(len(counts))
        first_s = np.full(len(counts), np.inf)
        at_s = ends_s[self.answers[:, 1]]
        np.maximum.at(last_s, request, at_s)
        np.minimum.at(first_s, request, at_s)
        several = counts > 1
        return ((last_s - first_s) / np.maximum(counts - 1, 1))[several]


def serve(trace: Trace, clients: Clients) -> Served:
    """Serve the requests of `trace` in the order in which they began, and from the first again.

    It ends when a client asks for more than every request of the trace and, beside those met
    half-way, one request for each client. Until then all clients are busy, but a single client's
    requests are all served to their end.
    """
    serving = _Serving(trace, clients)
    while serving.go_on():
        pass
    return serving.served()


@dataclass(slots=True)
class _Request:
    """The tokens `next` to `stop` of a request are still to be computed; the first `prompt` of them
    are its prompt."""

    number: int
    next: int
    stop: int
    prompt: int


class _Serving:
    """Tokens are numbered by request, in the order in which each computed them."""

    def __init__(self, trace: Trace, clients: Clients) -> None:
        self._trace = trace
        self._chunk = clients.chunk
        self._random = np.random.default_rng(clients.seed)
        self._find_tokens()
        self._most = max(len(self._first), clients.count) + clients.count - 1
        self._arrived: list[int] = []
        self._running: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._computed: list[
            tuple[int, int, int, int]
        ] = []  # pass, request, first token and their number
        self._answers: list[tuple[int, int]] = []
        self._pass = 0
        for client in range(clients.count):
            self._begin(is_met=client > 0)

    def _find_tokens(self) -> None:
        """Find the rows of each token, and the tokens of each request in the order in which
        requests began."""
        trace = self._trace
        passes = trace.pass_indices()
        self._rows = rows = np.lexsort((trace.layer, trace.token, passes, trace.request))
        is_new = np.logical_or.reduce(
            [np.diff(column[rows]) != 0 for column in (trace.request, passes, trace.token)]
        )
        # of each token's rows
        self._starts = np.flatnonzero(np.concatenate(([True], is_new, [True])))
        of_token = rows[self._starts[:-1]]
        _, first, counts = np.unique(trace.request[of_token], return_index=True, return_counts=True)
        prompts = np.add.reduceat((trace.phase[of_token] == PREFILL).astype(np.int64), first)
        order = np.argsort(passes[of_token[first]], kind="stable")
        self._first = first[order]
        self._counts = counts[order]
        self._prompts = prompts[order]

    def _begin(self, *, is_met: bool = False) -> None:
        """Begin the next request, half-way if its client `is_met`."""
        number = len(self._arrived)
        which = number % len(self._first)
        first, count, prompt = (
            int(column[which]) for column in (self._first, self._counts, self._prompts)
        )
        done = int(self._random.integers(prompt, count)) if is_met and prompt < count else 0
        self._arrived.append(-1 if done else self._pass)
        request = _Request(number, first + done, first + count, max(0, prompt - done))
        (self._waiting if request.prompt else self._running).append(request)

    def go_on(self) -> bool:
        """Compute one pass, and return whether there is another."""
        decoding = self._running
        self._running = []
        num_ended = sum([not self._compute(request, 1) for request in decoding])
        room = self._chunk
        while self._waiting and room:
            request = self._waiting[0]
            count = min(room, request.prompt)
            room = room - count
            request.prompt = request.prompt - count
            if request.prompt:
                self._note(request, count)
            else:
                self._waiting.popleft()
                num_ended += not self._compute(request, count)
        self._pass += 1
        if len(self._arrived) + num_ended > self._most:
            return False
        for _ in range(num_ended):
            self._begin()
        return True

    def _compute(self, request: _Request, count: int) -> bool:
        """Compute tokens up to one of the answer, and return whether more of it follow."""
        self._note(request, count)
        self._answers.append((request.number, self._pass))
        if request.next < request.stop:
            self._running.append(request)
        return request.next < request.stop

    def _note(self, request: _Request, count: int) -> None:
        self._computed.append((self._pass, request.number, request.next, count))
        request.next += count

    def served(self) -> Served:
        passes, requests, first, counts = np.array(self._computed).T
        passes = np.repeat(passes, counts)
        requests = np.repeat(requests, counts)
        tokens = _ranges(first, counts)
        num_rows = np.diff(self._starts)[tokens]
        trace = self._trace.take(self._rows[_ranges(self._starts[tokens], num_rows)])
        trace = replace(
            trace,
            pass_=np.repeat(passes, num_rows).astype(np.int32),
            request=np.repeat(requests, num_rows).astype(np.int32),
        )
        num_repeated = max(0, len(self._arrived) - len(self._first))
        return Served(trace, np.array(self._arrived), np.array(self._answers), num_repeated)


def _ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return first[0], first[0] + 1, ... (counts[0] of them), first[1], ..."""
    return np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
