"""Replays each part of a trace's requests with maps of the other parts, and adds up what every
request met.

Shapes: R requests, B resamplings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from artifacts.errors import BadInput
from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import MODELS, ModelShape
from artifacts.routing.expert_maps import ExpertMaps
from artifacts.shape import Shape
from artifacts.traces.trace import Trace
from runtime.policies.base import Artefacts
from runtime.replay import from_trace
from runtime.replay.settings import Outcome, Setting
from runtime.replay.workload import Workload
from tools.reproductions.fmoe.figures import CAPACITY, DISTANCE, MACHINE
from tools.reproductions.intervals import resampled

NUM_FOLDS = 4
BUDGET = "25%"
_HITS, _REQUESTS, _PREFILL_S, _PREFILLS, _DECODE_S, _DECODES = range(6)


@dataclass(frozen=True, slots=True)
class FoldConditions:
    """Conditions that systems are compared under: scope and size of the cache, and the model whose
    costs on MACHINE count.

    Without a model the link carries as many experts per layer as a token selects, and times mean
    nothing.
    """

    scope: str = "global"
    budget: str = BUDGET
    costs_of: str | None = None


@dataclass(frozen=True, slots=True)
class ByRequest:
    """Sums of each request over a replay: `sums` [6, R] of hits, requested experts, seconds and
    number of prefills, seconds and number of decode passes."""

    sums: np.ndarray

    def hit_rate(self, weights: np.ndarray) -> np.ndarray:
        """Return hit rates [B] when requests count `weights` [B, R] times; the other methods take
        the same weights."""
        return self._ratio(_HITS, _REQUESTS, weights)

    def ttft_s(self, weights: np.ndarray) -> np.ndarray:
        return self._ratio(_PREFILL_S, _PREFILLS, weights)

    def tpot_s(self, weights: np.ndarray) -> np.ndarray:
        return self._ratio(_DECODE_S, _DECODES, weights)

    def latency_s(self, weights: np.ndarray) -> np.ndarray:
        """Seconds of a request from end to end, the mean."""
        return (self.sums[_PREFILL_S] + self.sums[_DECODE_S]) @ weights.T / weights.sum(axis=1)

    def _ratio(self, over: int, under: int, weights: np.ndarray) -> np.ndarray:
        return (weights @ self.sums[over]) / (weights @ self.sums[under])


@dataclass(frozen=True, slots=True)
class Fold:
    """A part of the requests, and the iterations of all others."""

    replayed: Trace
    others: Trace
    shape: Shape
    maps: ExpertMaps

    def maps_of(self, capacity: int) -> ExpertMaps:
        """Return a store of at most `capacity` of the others' iterations."""
        return _maps(self.others, self.shape, capacity)


def _maps(others: Trace, shape: Shape, capacity: int) -> ExpertMaps:
    distance = min(DISTANCE, others.num_layers)
    return from_trace.maps(others, shape, capacity=capacity, distance=distance)


class Folds:
    """A trace's requests in up to four parts, each replayed with maps of the others. Raises
    BadInput for a trace with one request."""

    def __init__(self, trace: Trace, model: ModelShape, source: str) -> None:
        self.trace = trace
        self.model = model
        self.source = source
        requests = np.unique(trace.request)
        if len(requests) < 2:
            raise BadInput(f"{source} has one request: some are to make the maps of the others")
        self.parts = [
            self._fold(held) for held in np.array_split(requests, min(NUM_FOLDS, len(requests)))
        ]
        self.num_requests = len(requests)

    def _fold(self, held: np.ndarray) -> Fold:
        is_held = np.isin(self.trace.request, held)
        others = self.trace.take(~is_held)
        shape = self.model.shape
        maps = _maps(others, shape, CAPACITY)
        return Fold(self.trace.take(is_held), others, shape, maps)

    @property
    def num_maps(self) -> list[int]:
        """Number of maps that each part is replayed with."""
        return [len(fold.maps) for fold in self.parts]

    @property
    def num_iterations(self) -> list[int]:
        """Number of the others' iterations, of each part."""
        return [len(np.unique(fold.others.iteration)) for fold in self.parts]

    @cached_property
    def weights(self) -> np.ndarray:
        return resampled(self.num_requests)

    def run(
        self,
        preset: str = "on-demand",
        *,
        conditions: FoldConditions,
        from_empty: bool = False,
        learns: bool = True,
        **policies: str,
    ) -> ByRequest:
        """Replay all parts, each from an empty cache. `from_empty`: without maps of other
        requests."""
        setting = Setting(
            preset, preset, policies=policies, scope=conditions.scope, budget=conditions.budget
        )
        sums = []
        for fold in self.parts:
            known = Artefacts() if from_empty else Artefacts(maps=fold.maps, learns_maps=learns)
            workload = Workload(
                fold.replayed,
                self.model,
                machine(MACHINE),
                artefacts=known,
                **self._pace(conditions),
            )
            sums.append(_by_request(fold.replayed, workload.run(setting)))
        return ByRequest(np.concatenate(sums, axis=1))

    def _pace(self, conditions: FoldConditions) -> Mapping[str, object]:
        if conditions.costs_of is None:
            return {"window": self.model.shape.top_k * self.model.shape.expert_nbytes}
        return {"costs": Costs.of(MODELS[conditions.costs_of], machine(MACHINE))}


def _by_request(trace: Trace, outcome: Outcome) -> np.ndarray:
    """Sums [6, R] over each request's passes; a pass of several requests counts for the first of
    them."""
    passes = trace.pass_indices()
    requests = np.unique(trace.request, return_inverse=True)[1]
    unit = np.full(passes.max() + 1, requests.max())
    np.minimum.at(unit, passes, requests)
    columns = np.zeros((6, len(unit)))
    columns[[_HITS, _REQUESTS]] = np.array(outcome.hits_by_pass).T
    for number, taken in enumerate(outcome.passes):
        seconds, count = (_DECODE_S, _DECODES) if taken.num_decoded else (_PREFILL_S, _PREFILLS)
        columns[[seconds, count], number] = taken.seconds, 1
    return np.stack([np.bincount(unit, column, minlength=requests.max() + 1) for column in columns])
