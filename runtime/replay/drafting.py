"""Drafting oracle: what a verification of several drafts costs a placement, and which number of
drafts is fastest there."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from artifacts.errors import BadInput, BadUsage
from artifacts.traces.trace import PREFILL, Trace, concatenate

if TYPE_CHECKING:  # imports every policy, which `verified` does not need
    from runtime.replay.settings import Outcome, Setting
    from runtime.replay.workload import Workload

MOST = 8
LENGTHS = range(MOST + 1)
ROUTED_AS_NEXT = (
    "a rejected draft routes like the recorded token in its place: a draft that is wrong may want "
    "other experts, so drafts may cost more"
)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of the next tokens, which one pass verifies.

    `acceptance`: the chance that the first, second, ... draft of a pass is right where those before
    it are; the last number holds for all that follow. `draft_s`: seconds to make one draft. A
    rejected draft routes like the recorded token in its place, or as the trace `rejected` says,
    whose rows are those of the replayed trace with a drafted token in place of each. Raises
    BadUsage.
    """

    acceptance: Sequence[float]
    draft_s: float = 0.0
    seed: int = 0
    rejected: Trace | None = None

    def __post_init__(self) -> None:
        if not self.acceptance or not all(0 <= chance <= 1 for chance in self.acceptance):
            raise BadUsage(f"acceptance is one or more numbers from 0 to 1, not {self.acceptance}")
        if not self.draft_s >= 0:
            raise BadUsage(f"a draft takes 0 seconds or more, not {self.draft_s}")


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One length: `num_drafts` a pass, decoded tokens a pass, distinct experts a layer of a pass,
    and misses, bytes over the link and seconds a token."""

    num_drafts: int
    tokens_per_pass: float
    experts_per_layer: float
    misses_per_token: float
    nbytes_per_token: float
    seconds_per_token: float


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The fastest number of drafts, 0 where none pays, and the rows by rising length."""

    length: int
    rows: tuple[DraftRow, ...]
    assumed: tuple[str, ...]


def best_draft(
    workload: "Workload", setting: "Setting", drafts: Drafts, *, lengths: Iterable[int] = LENGTHS
) -> DraftChoice:
    """Replay the workload's trace under the setting once for each length, and once without drafts.
    Raises BadUsage for a length beyond 0 to 8, and as `Workload.run` does.

    Requests are served one after another. A draft of a token is right in every length or in none.
    """
    rows = []
    for length in _asked(lengths):
        other = workload.of_trace(verified(workload.trace, length, drafts))
        outcome = other.run(setting)
        if not length:
            num_tokens = sum(one.num_decoded for one in outcome.passes)
            if not num_tokens:
                raise BadInput("the trace decodes no token: drafts are of decoded ones")
        rows.append(_row(length, outcome, num_tokens, drafts.draft_s))
    fastest = min(rows, key=lambda row: row.seconds_per_token)
    notes = () if drafts.rejected else (ROUTED_AS_NEXT,)
    return DraftChoice(fastest.num_drafts, tuple(rows), (*other.assumed, *notes))


def _asked(lengths: Iterable[int]) -> list[int]:
    asked = sorted({0, *lengths})
    if asked[0] < 0 or asked[-1] > MOST:
        raise BadUsage(f"a pass verifies 0 to {MOST} drafts, not {asked[0]} to {asked[-1]}")
    return asked


def _row(length: int, outcome: "Outcome", num_tokens: int, draft_s: float) -> DraftRow:
    passes = [one for one in outcome.passes if one.decodes]
    counts = outcome.decoding
    moved_nbytes = counts["demand_bytes"] + counts["prefetch_bytes"]
    seconds = sum(one.seconds for one in passes) + len(passes) * length * draft_s
    return DraftRow(
        length,
        num_tokens / len(passes),
        counts["requests"] / len(passes) / len(outcome.by_layer),
        counts["misses"] / num_tokens,
        moved_nbytes / num_tokens,
        seconds / num_tokens,
    )


def verified(trace: Trace, length: int, drafts: Drafts) -> Trace:
    """Return the trace as it is computed with `length` drafts a pass: a pass of a decoded token and
    of the drafts behind it, as far as the request goes, one request after another. Those that are
    wrong are `rejected`; drafts that the trace has are left out. Prompts stay as they were
    recorded. Raises BadInput where the trace of rejected drafts has other rows."""
    trace = trace.kept()
    computed = _with_rejected(trace, drafts.rejected)
    tokens = _rows_by_token(trace)
    firsts = np.array([rows[0] for rows in tokens])
    windows = _windows(trace.request[firsts], _prompts(trace, firsts), length, drafts)
    shift = len(computed) - len(trace)  # to the rows of rejected drafts
    rows = [
        np.concatenate(tokens[first:right] + [one + shift for one in tokens[right:stop]])
        for first, right, stop in windows
    ]
    is_wrong = [
        np.repeat(np.arange(first, stop) >= right, [*map(len, tokens[first:stop])])
        for first, right, stop in windows
    ]
    numbers = np.repeat(np.arange(len(rows)), list(map(len, rows)))
    return replace(
        computed.take(np.concatenate(rows)),
        pass_=numbers.astype(np.int32),
        rejected=np.concatenate(is_wrong) if length else None,
    )


def _with_rejected(trace: Trace, rejected: Trace | None) -> Trace:
    """Return the rows of the trace, and those of rejected drafts behind them."""
    if rejected is None:
        return trace
    _check_same_rows(trace, rejected)
    return concatenate((trace, rejected))


def _rows_by_token(trace: Trace) -> list[np.ndarray]:
    """Return the rows of each token, layer by layer; tokens are in order by request."""
    passes = trace.pass_indices()
    order = np.lexsort((trace.layer, trace.token, passes, trace.request))
    by_token = [column[order] for column in (trace.request, passes, trace.token)]
    is_new = np.logical_or.reduce([np.diff(column) != 0 for column in by_token])
    return np.split(order, np.flatnonzero(is_new) + 1)


def _prompts(trace: Trace, firsts: np.ndarray) -> np.ndarray:
    """Return for each token the pass of its prompt, -1 where it is decoded."""
    return np.where(trace.phase[firsts] == PREFILL, trace.pass_indices()[firsts], -1)


def _windows(
    requests: np.ndarray, prompts: np.ndarray, length: int, drafts: Drafts
) -> list[tuple[int, int, int]]:
    """Return for each pass its first token, the one behind the last that is right, and the one
    behind the last that is computed; tokens are numbered by request."""
    draws = np.random.default_rng(drafts.seed).random(len(requests))
    chances = [*drafts.acceptance, *[drafts.acceptance[-1]] * length][:length]
    windows = []
    token = 0
    for stop in _stops(requests, prompts):
        if prompts[token] >= 0:
            windows.append((token, stop, stop))
            token = stop
        while token < stop:
            end = min(token + 1 + length, stop)
            wrong = draws[token + 1 : end] >= chances[: end - token - 1]
            right = token + 1 + int(np.argmax(np.append(wrong, True)))
            windows.append((token, right, end))
            token = right
    return windows


def _stops(requests: np.ndarray, prompts: np.ndarray) -> list[int]:
    """Return the tokens behind the last of each prompt and of each request's decoding."""
    changes = (np.diff(requests) != 0) | (np.diff(prompts) != 0)
    return [*(np.flatnonzero(changes) + 1).tolist(), len(requests)]


def _check_same_rows(trace: Trace, rejected: Trace) -> None:
    names = ("request", "pass_", "layer", "token", "phase")
    same = len(trace) == len(rejected) and trace.columns().keys() == rejected.columns().keys()
    if not same or any((getattr(trace, name) != getattr(rejected, name)).any() for name in names):
        raise BadInput(
            "the trace of rejected drafts has other rows than the trace: record it on the same "
            "tokens' places, each token replaced by its draft"
        )
