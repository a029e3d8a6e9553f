"""Hit and prediction curves (MoEpic): hits of a cache of every size, in one pass over a trace.

Under lcp the priority of an expert counts its uses whether it is cached or not. So at each step one
order serves caches of every size, and all caches are followed side by side, each exactly. As long
as no step wants more than fits, a larger cache holds everything that a smaller one holds, and one
number per expert would describe all sizes. A step that runs in waves, as steps of prompts do,
breaks that inclusion for good, so nothing here relies on it.

Shapes: N rows of a trace, S steps of a layer, R predictions, E experts, L layers.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from artifacts.errors import BadInput
from artifacts.shape import Shape
from artifacts.traces.trace import DECODE, PREFILL, Trace, pair

_PRIORITIES_AT_A_TIME = 1 << 19
_NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """`hit[l, C]`: hit rate with C cached experts, C from 0 to E. `prediction[l, y]`: how often the
    expert predicted as the y-th most probable, y from 0, is selected. `prediction_hit[l, y, C]`:
    how often that expert is cached.

    `requests` [L] and `predictions` [L] count what each value is the mean of; a mean of none is 0.
    """

    hit: np.ndarray
    prediction: np.ndarray
    prediction_hit: np.ndarray
    requests: np.ndarray
    predictions: np.ndarray


def measure(
    trace: Trace,
    shape: Shape,
    *,
    phases: Collection[int] = (PREFILL, DECODE),
    rho: float = 0.25,
    omega: float = 128.0,
    uses: str = "passes",
) -> Curves:
    """Measure the curves of every layer over the steps in `phases`. Other steps pass through the
    caches too, which begin empty. `rho`, `omega` and `uses` are options of the eviction policy lcp.

    A token's experts are predicted from its own row one layer before; in layer 0 from the last
    layer's row of the last token in the request's previous pass, if there was one. A trace without
    predictions has no prediction curves. Raises BadInput when the trace cannot belong to this
    shape.
    """
    _check(trace, shape)
    counts = [_Counts(shape.num_experts) for _ in range(shape.num_layers)]
    for layer, steps in _layers(trace, shape, phases, by_token=uses == "tokens"):
        priorities = _Priorities(shape.num_experts, rho, omega)
        for piece in steps.pieces(max(1, _PRIORITIES_AT_A_TIME // shape.num_experts)):
            counts[layer].add(piece, priorities.order(piece))
    requests, predictions = (
        np.array([getattr(layer, name) for layer in counts]) for name in ("requests", "predictions")
    )
    return Curves(
        hit=np.stack([layer.hits / max(layer.requests, 1) for layer in counts]),
        prediction=np.stack([layer.right / max(layer.predictions, 1) for layer in counts]),
        prediction_hit=np.stack([layer.cached / max(layer.predictions, 1) for layer in counts]),
        requests=requests,
        predictions=predictions,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """Steps of one layer in order. Step s wants `wanted[starts[s] : starts[s + 1]]`, in order of
    first appearance. `uses` counts how often it uses each, `ages` the tokens from its last use to
    the step's last token; `num_tokens` [S] tokens have been seen by then. `predicted` [R, E] are
    predictions for tokens whose experts are `selected` [R, K]; the predictions of step s begin at
    row `predicted_starts[s]`."""

    wanted: np.ndarray
    uses: np.ndarray
    ages: np.ndarray
    starts: np.ndarray
    num_tokens: np.ndarray
    is_counted: np.ndarray
    predicted: np.ndarray
    selected: np.ndarray
    predicted_starts: np.ndarray

    def pieces(self, size: int) -> Iterator["_Steps"]:
        """Yield pieces of `size` steps."""
        for first in range(0, len(self.num_tokens), size):
            steps = slice(first, first + size)
            starts, predicted_starts = (
                column[first : first + size + 1] for column in (self.starts, self.predicted_starts)
            )
            rows = slice(predicted_starts[0], predicted_starts[-1])
            own = slice(starts[0], starts[-1])
            yield _Steps(
                self.wanted[own],
                self.uses[own],
                self.ages[own],
                starts - starts[0],
                self.num_tokens[steps],
                self.is_counted[steps],
                self.predicted[rows],
                self.selected[rows],
                predicted_starts - predicted_starts[0],
            )


class _Priorities:
    """Uses of each expert of a layer and the tokens since the last use, counted as the eviction
    policy lcp does."""

    def __init__(self, num_experts: int, rho: float, omega: float) -> None:
        self._rho = rho
        self._omega = omega
        self._uses = np.zeros(num_experts, np.int64)
        self._last = np.zeros(num_experts, np.int64)

    def order(self, steps: _Steps) -> np.ndarray:
        """[S, E]: at each step, its own uses counted, the experts by rising priority; equals by the
        lower expert."""
        num_tokens = steps.num_tokens[:, None]
        step = np.repeat(np.arange(len(num_tokens)), np.diff(steps.starts))
        added = np.zeros((len(num_tokens), len(self._uses)), np.int64)
        last_token = added.copy()
        added[step, steps.wanted] = steps.uses
        last_token[step, steps.wanted] = steps.num_tokens[step] - steps.ages
        uses = self._uses + np.cumsum(added, axis=0)
        last = np.maximum(self._last, np.maximum.accumulate(last_token, axis=0))
        self._uses = uses[-1]
        self._last = last[-1]
        return np.argsort(
            uses * self._rho ** ((num_tokens - last) / self._omega), axis=1, kind="stable"
        )


class _Counts:
    """Hits and cached predictions of one layer's caches of all sizes; the cache of size 0 is always
    empty."""

    def __init__(self, num_experts: int) -> None:
        self._resident = np.zeros((num_experts, num_experts + 1), np.uint8)
        self._held = np.zeros(num_experts + 1, np.int64)
        self.hits = self._held.copy()
        self.cached = np.zeros(self._resident.shape, np.int64)
        self.right = np.zeros(num_experts, np.int64)
        self.requests = self.predictions = 0

    def add(self, steps: _Steps, order: np.ndarray) -> None:
        # Compiled code takes a while to load: it is imported only where a trace is followed.
        from artifacts.traces.curve_kernels import follow

        ranked = np.argsort(-steps.predicted, axis=1, kind="stable")
        taken = (
            steps.wanted,
            steps.starts,
            steps.is_counted,
            order,
            ranked,
            steps.predicted_starts,
        )
        follow(self._resident, self._held, *taken, self.hits, self.cached)
        is_counted = np.repeat(steps.is_counted, np.diff(steps.predicted_starts))
        is_selected = np.zeros(ranked.shape, bool)
        np.put_along_axis(is_selected, steps.selected, True, axis=1)
        self.right += np.take_along_axis(is_selected, ranked, axis=1)[is_counted].sum(axis=0)
        self.predictions += int(is_counted.sum())
        self.requests += int(np.diff(steps.starts)[steps.is_counted].sum())


def _layers(
    trace: Trace, shape: Shape, phases: Collection[int], *, by_token: bool
) -> Iterator[tuple[int, _Steps]]:
    """The steps of each layer that occurs; uses are counted by token, or one a pass."""
    ordered, spans = trace.scheduled()
    pass_index, phase, layer, rows = zip(*spans, strict=True)
    starts = np.array([span.start for span in rows])
    lengths = np.diff([*starts, len(trace)])
    is_first = np.diff(pass_index, prepend=_NONE) != 0
    # Tokens count in the first step of each pass, as in the controller.
    num_tokens = np.cumsum(np.where(is_first, lengths, 0))
    sources = _sources(ordered, np.repeat(pass_index, lengths), shape.num_layers)
    is_counted = np.isin(phase, list(phases))
    for number in range(shape.num_layers):
        own_steps = np.flatnonzero(np.array(layer) == number)
        if len(own_steps):
            own_rows = [rows[step] for step in own_steps]
            steps = _steps(ordered, sources, own_rows, num_tokens[own_steps], is_counted[own_steps])
            yield number, _by_token(steps, ordered.experts, own_rows) if by_token else steps


def _by_token(steps: _Steps, experts: np.ndarray, rows: list[slice]) -> _Steps:
    """The same steps with each token's use counted."""
    uses = steps.uses.copy()
    ages = steps.ages.copy()
    for step, start, end in zip(rows, steps.starts, steps.starts[1:], strict=False):
        if step.stop - step.start > 1:
            used = (experts[step, :, None] == steps.wanted[start:end]).any(axis=1)  # [T, W]
            uses[start:end] = used.sum(axis=0)
            ages[start:end] = used[::-1].argmax(axis=0)
    return replace(steps, uses=uses, ages=ages)


def _steps(
    trace: Trace,
    sources: np.ndarray,
    rows: list[slice],
    num_tokens: np.ndarray,
    is_counted: np.ndarray,
) -> _Steps:
    experts = trace.experts.astype(np.int64)
    wanted = [list(dict.fromkeys(experts[step].ravel().tolist())) for step in rows]
    starts = _starts(wanted)
    predicted_rows = [np.arange(step.start, step.stop)[sources[step] != _NONE] for step in rows]
    of_rows = np.concatenate(predicted_rows)
    predicted = (
        np.zeros((0, 1), np.float32)
        if trace.predicted is None
        else trace.predicted[sources[of_rows], 0]
    )
    return _Steps(
        wanted=np.concatenate(wanted),
        uses=np.ones(starts[-1], np.int64),
        ages=np.zeros(starts[-1], np.int64),
        starts=starts,
        num_tokens=num_tokens,
        is_counted=is_counted,
        predicted=predicted,
        selected=experts[of_rows],
        predicted_starts=_starts(predicted_rows),
    )


def _sources(trace: Trace, passes: np.ndarray, num_layers: int) -> np.ndarray:
    """[N] the row whose prediction is about each row's layer, or _NONE. Rows are in execution
    order."""
    sources = np.full(len(trace), _NONE)
    if trace.predicted is None:
        return sources
    order = np.lexsort((trace.layer, trace.token, trace.request, passes))
    same = [np.diff(column[order]) == 0 for column in (trace.token, trace.request, passes)]
    follows = np.flatnonzero(np.logical_and.reduce(same) & (np.diff(trace.layer[order]) == 1))
    sources[order[follows + 1]] = order[follows]
    # The last layer's last row of each request and pass predicts the request's next pass.
    ends, starts = (np.flatnonzero(trace.layer == layer) for layer in (num_layers - 1, 0))
    ends = ends[np.lexsort((trace.token[ends], passes[ends], trace.request[ends]))]
    keys = pair(trace.request[ends], passes[ends])
    before = np.searchsorted(keys, pair(trace.request[starts], passes[starts])) - 1
    starts = starts[before >= 0]
    before = ends[before[before >= 0]]
    has_one = trace.request[before] == trace.request[starts]
    sources[starts[has_one]] = before[has_one]
    return sources


def _starts(parts: list) -> np.ndarray:
    return np.cumsum([0, *map(len, parts)])


def _check(trace: Trace, shape: Shape) -> None:
    highest = int(trace.experts.max())
    if (
        highest >= shape.num_experts
        or trace.num_layers > shape.num_layers
        or trace.top_k != shape.top_k
    ):
        raise BadInput(
            f"the trace has {trace.num_layers} layers, experts up to {highest} and {trace.top_k} "
            f"a token, the model {shape.num_layers}, {shape.num_experts - 1} and {shape.top_k}: "
            "it is another model's"
        )
    if trace.predicted is not None and trace.predicted.shape[2] != shape.num_experts:
        raise BadInput(
            f"the trace predicts {trace.predicted.shape[2]} experts a layer, the model has "
            f"{shape.num_experts}"
        )
