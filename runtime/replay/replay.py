"""Replays a trace through the controller: the decisions of the live run, without the model, on
virtual time."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from artifacts.errors import BadInput
from artifacts.traces.trace import DECODE, PREFILL, Trace
from runtime.control.controller import Controller
from runtime.control.plan import Plan
from runtime.control.splits.resplit import Reconfiguration
from runtime.policies.step import Opening, Step, last_tokens
from runtime.replay.virtual_time import ReplayTiming

_LACKS_ROWS = "the trace lacks rows of a pass with drafts: record it anew"


def replay(
    trace: Trace,
    controller: Controller,
    timing: ReplayTiming | None = None,
    *,
    reconfiguration: Reconfiguration | None = None,
    watch: Callable[[Step, Plan], None] | None = None,
) -> None:
    """Replay every step of `trace` in order; results are in `controller.counters` and `timing`.
    `watch` is called with every step and its plan."""
    if trace.num_layers > controller.shape.num_layers:
        raise BadInput(
            f"the trace has {trace.num_layers} layers, the model {controller.shape.num_layers}: "
            "it is another model's"
        )
    current = -1
    idle = _begin_idle(trace) if reconfiguration else frozenset()
    ordered, spans = replace(trace, experts=trace.experts.astype(np.int64)).scheduled()
    drafts = _Drafts(ordered, controller, reconfiguration)
    for pass_index, phase, layer, rows in spans:
        step = _step(ordered, rows, pass_index, phase, layer, controller)
        if pass_index != current:
            current = pass_index
            drafts.settle()
            if pass_index in idle:
                reconfiguration.between_requests()
            if reconfiguration:
                reconfiguration.begin_pass(ordered.request[rows])
            controller.begin_pass(len(step.selected), num_drafts=drafts.begin_pass(rows))
            if timing:
                timing.begin_pass(**_pass_of(ordered, rows, drafts.in_vain))
            if controller.opens_passes:
                opening = Opening(pass_index, phase, step.embedding, drafts.foretold)
                opened = controller.open_pass(opening)
                if timing:
                    timing.open_pass(opened)
        step.drafted = drafts.of(rows)
        step.foretold = drafts.foretold
        if reconfiguration:
            reconfiguration.add(step)
        plan = controller.step(step)
        if timing:
            timing.step(plan)
        if watch:
            watch(step, plan)
    drafts.settle()
    if timing:
        timing.end_pass()


class _Drafts:
    """Tells the controller what became of the drafts of each pass, as the live run did.

    Where a trace says what was rejected, a request's decoded tokens behind its first one in a pass
    are drafts. `foretold` [T, L, K] is what they told of the pass, as in `Step`.
    """

    def __init__(
        self, trace: Trace, controller: Controller, reconfiguration: Reconfiguration | None
    ) -> None:
        self.in_vain = trace.in_vain()
        self.foretold: np.ndarray | None = None
        self._trace = trace
        self._drafted = trace.drafted()
        self._controller = controller
        self._reconfiguration = reconfiguration
        self._rows: slice | None = None  # of a pass that is to be settled, in its first layer

    def of(self, rows: slice) -> np.ndarray | None:
        """Return which tokens [T] of a step are drafts; None for none. Raises BadInput for a step
        that lacks tokens of its pass."""
        if self._rows is None:
            return None
        if rows.stop - rows.start != self._rows.stop - self._rows.start:
            raise BadInput(_LACKS_ROWS)
        return self._drafted[rows]

    def begin_pass(self, rows: slice) -> int:
        """Begin a pass with these rows in its first layer. Returns the number of its drafts."""
        num_drafts = int(self._drafted[rows].sum())
        self._rows = rows if num_drafts else None
        self.foretold = None if self._trace.foretold is None else self._told(rows)
        return num_drafts

    def _told(self, rows: slice) -> np.ndarray | None:
        num_tokens = rows.stop - rows.start
        num_layers = self._controller.shape.num_layers
        of_pass = slice(rows.start, rows.start + num_tokens * num_layers)
        told = self._trace.foretold[of_pass]
        if (told < 0).all():
            return None
        if (self._trace.layer[of_pass] != np.arange(num_layers).repeat(num_tokens)).any():
            raise BadInput(_LACKS_ROWS)
        return told.reshape(num_layers, num_tokens, -1).transpose(1, 0, 2)

    def settle(self) -> None:
        """Tell what was accepted of the pass that has ended, if it had drafts."""
        if self._rows is None:
            return
        rejected = self._trace.rejected[self._rows]
        self._controller.settle(self._drafted[self._rows] & ~rejected)
        if self._reconfiguration:
            self._reconfiguration.settle(rejected, self.in_vain[self._rows])
        self._rows = None


def _pass_of(trace: Trace, rows: slice, in_vain: np.ndarray) -> dict[str, int]:
    """Return what `ReplayTiming` is told of a pass, by the rows of its first layer."""
    phases = trace.phase[rows]
    num_heads = int((phases == DECODE).sum())
    num_vain = int(in_vain[rows].sum())
    num_prompts = len(np.unique(trace.request[rows][phases == PREFILL]))
    return {
        "num_tokens": len(phases),
        "num_decoded": num_heads - num_vain,
        "num_heads": num_heads + num_prompts,
        "num_vain": num_vain,
    }


def _begin_idle(trace: Trace) -> frozenset[int]:
    """Return the passes before which every request in progress has ended."""
    passes = trace.pass_indices()
    first, last = np.full((2, int(trace.request.max()) + 1), -1)
    order = np.argsort(passes, kind="stable")
    last[trace.request[order]] = passes[order]
    first[trace.request[order[::-1]]] = passes[order[::-1]]
    ends = np.zeros(int(passes.max()) + 1, np.int64)
    np.maximum.at(ends, first[first >= 0], last[first >= 0])
    open_until = np.maximum.accumulate(ends)
    begins = set(first[first >= 0].tolist())
    return frozenset(start for start in begins if start and open_until[start - 1] < start)


def _step(
    trace: Trace, rows: slice, pass_index: int, phase: int, layer: int, controller: Controller
) -> Step:
    """Return the step as the live run saw it, with predictions and embeddings only if policies read
    them."""
    predicted = learned = last = embedding = None
    if controller.num_predicted and trace.predicted is not None:
        predicted = trace.predicted[rows, : controller.num_predicted]
        last = last_tokens(trace.request[rows])
    if controller.num_learned and trace.learned is not None:
        learned = trace.learned[rows, : controller.num_learned]
        last = last_tokens(trace.request[rows])
    if controller.sees_embeddings and trace.iteration is not None:
        last = last_tokens(trace.request[rows])
        embedding = trace.embeddings[trace.iteration[rows][last]]
    return Step(
        pass_index=pass_index,
        phase=phase,
        layer=layer,
        selected=trace.experts[rows],
        weights=trace.weights[rows],
        probabilities=None if trace.probabilities is None else trace.probabilities[rows],
        predicted=predicted,
        learned=learned,
        last=last,
        embedding=embedding,
        requests=trace.request[rows],
        prompts=_prompts(trace.phase[rows]) if phase == PREFILL else None,
    )


def _prompts(phases: np.ndarray) -> np.ndarray | None:
    """Return which tokens [T] are of prompts; None where all are."""
    prompts = phases == PREFILL
    return None if prompts.all() else prompts
