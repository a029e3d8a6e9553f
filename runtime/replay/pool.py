"""A light replay: one pool of slots for all layers, as other engines have it, whose counts are
those of the simulator and whose times take a hundredth of its work."""

from dataclasses import dataclass

import numpy as np

from artifacts.hardware.costs import Costs
from artifacts.traces.trace import DECODE, Trace
from runtime.replay.pool_kernels import ACCEPTED, OWN, REJECTED, follow

SOONEST = -1.0
"""As `near_share`: of each step as many misses as let link and near tier end soonest, where both
read the same memory; those that were used last are loaded (FreeToken)."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotPool:
    """A pool of `num_slots` that evicts by `class_lru` (with one class by `lru`), beside the keys
    that are true in `held`, which are always there. A miss is loaded and waited for; once the pool
    is full, the near tier computes the share `near_share` of the misses instead, whole experts as
    they come due."""

    num_slots: int
    near_share: float = 0.0
    held: np.ndarray | None = None
    half_life: float = 128.0
    num_classes: int = 8


@dataclass(frozen=True, slots=True, eq=False)
class PoolOutcome:
    """Counts of each step [S, 4]: experts wanted, misses, those computed near, loads; and the
    seconds of the layers of each pass [P], without the head."""

    counts: np.ndarray
    seconds: np.ndarray


class Steps:
    """A trace's decoding as the replay reads it. Of each pass: its `request` [P] and its
    `num_tokens` [P]."""

    def __init__(self, trace: Trace, num_experts: int) -> None:
        decoded, passes = _decoded(trace)
        starts = _starts(passes, decoded.layer)
        self._num_experts = num_experts
        self._starts = np.append(starts, len(decoded))
        self._layers = decoded.layer[starts].astype(np.int64)
        self._passes = passes[starts]
        self._experts = decoded.experts.astype(np.int64)
        self._kinds = _kinds(decoded)
        self._firsts = np.flatnonzero(np.diff(passes[starts], prepend=-1))
        self.request = decoded.request[starts[self._firsts]]
        self.num_tokens = np.diff(self._starts)[self._firsts]

    def through(self, pool: SlotPool, costs: Costs) -> PoolOutcome:
        """Return what the pool does with the trace, from empty on."""
        held = self._held(pool)
        rule = (pool.half_life, pool.num_classes, pool.near_share, min(1.0, costs.link_over_near))
        counts = np.zeros((len(self._layers), 4), np.int64)
        seconds = np.zeros(len(self._layers))
        follow(
            self._starts,
            self._layers,
            self._passes,
            self._experts,
            self._kinds,
            min(pool.num_slots, len(held) - int(held.sum())),
            self._num_experts,
            held,
            np.array(rule),
            _seconds_of(costs),
            counts,
            seconds,
        )
        return PoolOutcome(counts, np.add.reduceat(seconds, self._firsts))

    def _held(self, pool: SlotPool) -> np.ndarray:
        if pool.held is not None:
            return pool.held.copy()
        return np.zeros((int(self._layers.max()) + 1) * self._num_experts, np.bool_)


def _decoded(trace: Trace) -> tuple[Trace, np.ndarray]:
    """Return the decoded rows, pass by pass and layer by layer, and the pass of each."""
    decoded = trace.take(np.flatnonzero(trace.phase == DECODE))
    passes = decoded.pass_indices()
    order = np.lexsort((decoded.layer, passes))
    return decoded.take(order), passes[order]


def _kinds(decoded: Trace) -> np.ndarray:
    """Return of each row [N] if it is a draft, and what became of it."""
    kinds = np.where(decoded.drafted(), ACCEPTED, OWN).astype(np.int8)
    if decoded.rejected is not None:
        kinds[decoded.rejected] = REJECTED
    return kinds


def _starts(passes: np.ndarray, layers: np.ndarray) -> np.ndarray:
    """Return the first row of each layer of each pass."""
    return np.flatnonzero(np.append(True, (np.diff(passes) != 0) | (np.diff(layers) != 0)))


def _seconds_of(costs: Costs) -> np.ndarray:
    works = (costs.rest, costs.expert, costs.near)
    rest, expert, near = ([work.memory_s, work.token_s] for work in works)
    load_s = costs.load_s + costs.load_latency_s
    return np.array([*rest, *expert, load_s, *near, costs.contention, costs.near_step_s])
