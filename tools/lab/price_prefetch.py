"""Measures prefetch policies on a trace in the simulator: how well they predict, and how much of it
is in time."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from artifacts.shape import Shape
from artifacts.traces.trace import DECODE, Trace
from runtime.control.build import build_controller
from runtime.control.counters import hit_rate
from runtime.policies import build
from runtime.policies.base import Artefacts, Now, Prefetch, Step
from runtime.policies.presets import Scope
from runtime.replay.replay import replay


@dataclass(frozen=True, slots=True)
class PrefetchTier:
    """The fast tier to prefetch into, and the bytes that the link may prefetch in a step."""

    num_slots: int
    scope: Scope
    eviction: str
    window: int


@dataclass(frozen=True, slots=True)
class PrefetchForesight:
    """The quality of one policy's predictions, and the effect of its prefetches.

    `recall` is the share of the experts wanted in decode steps that the policy had proposed for
    them, `precision` the share of the proposed that were wanted; both do not depend on the cache.
    `in_time` is the share of prefetches that were resident when wanted, `late` of those still
    loading; the rest was wasted or is still unused.
    """

    recall: float
    precision: float
    in_time: float
    late: float
    prefetch_bytes: int
    wasted_bytes: int
    demand_bytes: int
    misses: int
    hit_rate: float


def foresight(
    trace: Trace, shape: Shape, prefetch: str, tier: PrefetchTier, artefacts: Artefacts
) -> PrefetchForesight:
    """Replay the trace with a prefetch policy from an empty cache. Raises BadUsage or
    Incompatible."""
    texts = {
        "routing": "standard",
        "miss": "fetch",
        "residency": "uniform",
        "eviction": tier.eviction,
    }
    policies = build(texts | {"prefetch": prefetch})
    watched = _Watched(policies.prefetch)
    controller = build_controller(
        replace(policies, prefetch=watched),
        shape,
        num_slots=tier.num_slots,
        scope=tier.scope,
        window=tier.window,
        artefacts=artefacts,
    )
    replay(trace, controller)
    return _result(watched, controller.counters.totals(), shape)


def _result(watched: "_Watched", totals: Mapping[str, int], shape: Shape) -> PrefetchForesight:
    num_prefetches = max(1, totals["prefetches"])
    wasted = totals["wasted_bytes"] / shape.expert_nbytes
    return PrefetchForesight(
        recall=watched.num_right / max(1, watched.num_wanted),
        precision=watched.num_right / max(1, watched.num_named),
        in_time=max(0.0, (totals["prefetches"] - wasted - totals["late"]) / num_prefetches),
        late=totals["late"] / num_prefetches,
        prefetch_bytes=totals["prefetch_bytes"],
        wasted_bytes=totals["wasted_bytes"],
        demand_bytes=totals["demand_bytes"],
        misses=totals["misses"],
        hit_rate=hit_rate(totals),
    )


class _Watched:
    """A prefetch policy whose proposals are compared with the experts wanted in the steps that they
    are for."""

    def __init__(self, policy: Prefetch) -> None:
        self._policy = policy
        # keys, by the step that they are proposed for
        self._named: defaultdict[int, set[int]] = defaultdict(set)
        self.num_named = self.num_right = self.num_wanted = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape
        self._policy.prepare(shape, artefacts)

    def propose(self, step: Step, now: Now) -> np.ndarray:
        named = self._named.pop(now.step, set())
        if step.phase == DECODE:
            first = step.layer * self._shape.num_experts
            wanted = {first + expert for expert in step.selected.ravel().tolist() if expert >= 0}
            self.num_wanted += len(wanted)
            self.num_named += len(named)
            self.num_right += len(named & wanted)
        proposed = self._policy.propose(step, now)
        for key in proposed.tolist():
            ahead = (
                key // self._shape.num_experts - step.layer
            ) % self._shape.num_layers or self._shape.num_layers
            self._named[now.step + ahead].add(key)
        return proposed
