"""Routing traces: what the routers chose, per pass, layer and token, in the order in which it was
computed.

`artifacts.traces.parquet` reads and writes their files and tables.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from artifacts.errors import BadInput

PREFILL = 0
DECODE = 1
PHASES = ("prefill", "decode")  # by code
_NO_COLUMNS = ("embeddings", "assumed")  # fields without a value per row


@dataclass(frozen=True, slots=True, eq=False)
class TraceStep:
    """One MoE layer in one pass, its T tokens in the order in which they were computed.

    `pass_index` counts passes from 0 in the order in which they ran, whatever numbers the trace
    gave them. `phase` is PREFILL when any of the tokens is prefilled, else DECODE.
    """

    pass_index: int
    phase: int
    layer: int
    request: np.ndarray  # [T] int32
    token: np.ndarray  # [T] int32, position in its request
    experts: np.ndarray  # [T, K] uint16, strongest first
    weights: np.ndarray  # [T, K] float32
    probabilities: np.ndarray | None  # [T, E] float32
    predicted: np.ndarray | None  # [T, D, E] float32


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """N rows, one per (pass, layer, token); K experts selected of E.

    `predicted[n, d]` is the distribution that the router `d + 1` layers ahead gave for the router
    input of row n. The layers wrap: past the last layer the prediction is about the next pass.
    `learned` is the same from fitted predictors, which may look fewer layers ahead.
    Several tokens of one request in a decoding pass are the last one and drafts behind it; those
    `rejected` were read, and are no part of the answer.
    `embeddings[iteration[n]]` is the input embedding of row n's request in its pass, averaged over
    its tokens. `assumed` tells a reader which columns were missing from the file and what was
    assumed instead.
    """

    request: np.ndarray  # [N] int32
    pass_: np.ndarray  # [N] int32
    phase: np.ndarray  # [N] uint8, PREFILL or DECODE
    layer: np.ndarray  # [N] int32
    token: np.ndarray  # [N] int32
    experts: np.ndarray  # [N, K] uint16, strongest first
    weights: np.ndarray  # [N, K] float32
    probabilities: np.ndarray | None = None  # [N, E] float32
    predicted: np.ndarray | None = None  # [N, D, E] float32
    learned: np.ndarray | None = None  # [N, D, E] float32
    iteration: np.ndarray | None = None  # [N] int32, a row of `embeddings`
    embeddings: np.ndarray | None = None  # [I, H] float32
    # [N] bool: drafts that were read and not accepted; None: none
    rejected: np.ndarray | None = None
    # [N, K] int32: experts that the router chose for the token while it was drafted, -1 for none
    foretold: np.ndarray | None = None
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns().items()}
        assert len(set(lengths.values())) == 1, f"columns of one trace differ in length: {lengths}"
        assert self.experts.shape == self.weights.shape, (self.experts.shape, self.weights.shape)

    def __len__(self) -> int:
        return len(self.layer)

    @property
    def num_layers(self) -> int:
        """Layers up to the highest that occurs."""
        return int(self.layer.max()) + 1

    @property
    def top_k(self) -> int:
        return self.experts.shape[1]

    def columns(self) -> dict[str, np.ndarray]:
        """The columns that this trace has, by field name."""
        named = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in _NO_COLUMNS
        }
        return {name: column for name, column in named.items() if column is not None}

    def digest(self) -> str:
        """Return the SHA-256 of what was selected: the rows without what routers said beside it."""
        whole = hashlib.sha256()
        for column in (
            self.request,
            self.pass_,
            self.phase,
            self.layer,
            self.token,
            self.experts,
            self.weights,
        ):
            whole.update(f"{column.dtype}{column.shape}".encode())
            whole.update(np.ascontiguousarray(column))
        return whole.hexdigest()

    def take(self, rows: np.ndarray) -> "Trace":
        """A trace of the rows with these numbers, in this order."""
        return replace(self, **{name: column[rows] for name, column in self.columns().items()})

    def drafted(self) -> np.ndarray:
        """[N] bool: drafts, in a trace whose rows are in execution order; a trace that does not say
        what was rejected has none."""
        if self.rejected is None:
            return np.zeros(len(self), bool)
        is_again = [
            np.diff(column, prepend=-1) == 0 for column in (self.request, self.pass_, self.layer)
        ]
        return np.logical_and.reduce(is_again) & (self.phase == DECODE)

    def in_vain(self) -> np.ndarray:
        """[N] bool: drafts that were rejected, and tokens that a later pass reads again, which
        settles a tie."""
        if self.rejected is None:
            return np.zeros(len(self), bool)
        order = np.lexsort((self.pass_, self.layer, self.token, self.request))
        same = [np.diff(column[order]) == 0 for column in (self.layer, self.token, self.request)]
        vain = self.rejected.copy()
        vain[order[:-1][np.logical_and.reduce(same)]] = True
        return vain

    def kept(self) -> "Trace":
        """The trace without what was read in vain: each token once, as if nothing had been
        drafted, but for several tokens in a pass."""
        if self.rejected is None:
            return self
        stays = self.take(np.flatnonzero(~self.in_vain()))
        return replace(stays, rejected=None, foretold=None)

    def pass_indices(self) -> np.ndarray:
        """[N] int64: which pass computed each row, counted from 0 in order of first appearance.

        Rows with one pass number were computed together, so a batch is several requests in one
        pass. Where passes are numbered anew for each request, a pass is a (request, pass) pair.
        """
        number = self.pass_.astype(np.int64)
        if _is_numbered_anew(self.pass_, self.request):
            number = self.iteration_numbers()
        _, first, inverse = np.unique(number, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(first))[inverse]

    def iteration_numbers(self) -> np.ndarray:
        """[N] int64: equal for rows of the same request in the same pass, and only for those."""
        return pair(self.request, self.pass_)

    def steps(self) -> Iterator[TraceStep]:
        """Yield every step in execution order: passes as `pass_indices` counts them, and within a
        pass the layers from the lowest up.

        Tokens of a step keep the order of their rows.
        """
        ordered, spans = self.scheduled()
        for pass_index, phase, layer, rows in spans:
            yield TraceStep(
                pass_index=pass_index,
                phase=phase,
                layer=layer,
                request=ordered.request[rows],
                token=ordered.token[rows],
                experts=ordered.experts[rows],
                weights=ordered.weights[rows],
                probabilities=None
                if ordered.probabilities is None
                else ordered.probabilities[rows],
                predicted=None if ordered.predicted is None else ordered.predicted[rows],
            )

    def scheduled(self) -> "tuple[Trace, Iterator[tuple[int, int, int, slice]]]":
        """The rows in execution order; for each step its pass index, phase, layer and the slice of
        those rows."""
        passes = self.pass_indices()
        order = np.lexsort((self.layer, passes))
        ordered = self
        if not (order[1:] > order[:-1]).all():
            ordered = self.take(order)
            passes = passes[order]
        is_new = (np.diff(passes) != 0) | (np.diff(ordered.layer) != 0)
        starts = np.flatnonzero(np.append(True, is_new))
        spans = zip(
            passes[starts].tolist(),
            np.minimum.reduceat(ordered.phase, starts).tolist(),
            ordered.layer[starts].tolist(),
            map(slice, starts.tolist(), [*starts[1:].tolist(), len(self)]),
            strict=True,
        )
        return ordered, spans


def concatenate(parts: Sequence[Trace]) -> Trace:
    """Join the rows of `parts`, which have the same columns, in order."""
    assert parts, "nothing to concatenate"
    columns = [part.columns() for part in parts]
    joined = {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}
    if "iteration" in joined:
        counts = [len(part.embeddings) for part in parts]
        joined["iteration"] += np.repeat(
            np.cumsum([0, *counts[:-1]]), list(map(len, parts))
        ).astype(np.int32)
        joined["embeddings"] = np.concatenate([part.embeddings for part in parts])
    return replace(parts[0], **joined)


def guessed_phase(trace: Trace) -> np.ndarray:
    """[N] uint8: PREFILL for every pass in which some request has several tokens, else DECODE."""
    passes = trace.pass_indices()
    order = np.lexsort((trace.request, trace.layer, passes))
    same = [np.diff(column[order]) == 0 for column in (trace.request, trace.layer, passes)]
    is_repeated = np.logical_and.reduce(same)
    is_prefill = np.zeros(int(passes.max()) + 1, dtype=bool)
    is_prefill[passes[order][1:][is_repeated]] = True
    return np.where(is_prefill[passes], PREFILL, DECODE).astype(np.uint8)


def is_one_by_one(trace: Trace) -> bool:
    """Return whether the trace decodes, and never for two requests in one pass."""
    decoded = trace.phase == DECODE
    steps = trace.pass_indices()[decoded] * trace.num_layers + trace.layer[decoded]
    return bool(decoded.any()) and len(np.unique(steps)) == len(steps)


def cut_by_request(trace: Trace, share: float) -> tuple[Trace, Trace]:
    """Split off the last `share` of the requests; either side keeps at least one. Raises BadInput
    for a trace of one request."""
    requests: Sequence[int] = np.unique(trace.request).tolist()
    if len(requests) < 2:
        raise BadInput(
            "the trace has one request: nothing is left to check what is tuned on it; record a "
            "longer one"
        )
    border = requests[min(len(requests) - 1, max(1, round(len(requests) * (1 - share))))]
    return trace.take(np.flatnonzero(trace.request < border)), trace.take(
        np.flatnonzero(trace.request >= border)
    )


def _is_numbered_anew(pass_: np.ndarray, request: np.ndarray) -> bool:
    """Return whether a pass number returns, in a later block of rows, for a request that is not in
    its first block."""
    block = np.cumsum(np.diff(pass_, prepend=pass_[:1]) != 0)
    _, first, inverse = np.unique(pass_, return_index=True, return_inverse=True)
    is_first_block = block == block[first][inverse]
    pairs = pair(pass_, request)
    return len(np.unique(pairs)) > len(np.unique(pairs[is_first_block]))


def pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """[N] int64: one number for each pair of numbers of 32 bits, ordered as the pairs are."""
    return (high.astype(np.int64) << 32) | low.astype(np.int64)
