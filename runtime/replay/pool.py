"""A light replay: one pool of slots for all layers, as other engines have it, whose counts are those
of the simulator and whose times take a hundredth of its work."""

from dataclasses import dataclass

import numpy as np

from artifacts.hardware.costs import Costs
from artifacts.traces.trace import DECODE, Trace
from runtime.replay.pool_kernels import follow


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of `num_slots` that evicts by `class_lru` (with one class by `lru`), beside `num_held`
    layers, the last ones, whose experts are all held. Of a step's misses it waits for loads, except
    for the share `near_share`, which the near tier computes; those are loaded behind, as many as
    the link moves before the step ends."""

    num_slots: int
    near_share: float = 0.0
    num_held: int = 0
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
        decoded = trace.take(np.flatnonzero(trace.phase == DECODE))
        passes = decoded.pass_indices()
        order = np.lexsort((decoded.layer, passes))
        passes = passes[order]
        layers = decoded.layer[order]
        is_first = np.append(True, (np.diff(passes) != 0) | (np.diff(layers) != 0))
        starts = np.flatnonzero(is_first)
        self._num_experts = num_experts
        self._starts = np.append(starts, len(order))
        self._layers = layers[starts].astype(np.int64)
        self._experts = decoded.experts[order].astype(np.int64)
        self._firsts = np.flatnonzero(np.diff(passes[starts], prepend=-1))
        self.request = decoded.request[order][starts[self._firsts]]
        self.num_tokens = np.diff(self._starts)[self._firsts]

    def through(self, pool: Pool, costs: Costs) -> PoolOutcome:
        """Return what the pool does with the trace, from empty on."""
        counts = np.zeros((len(self._layers), 4), np.int64)
        seconds = np.zeros(len(self._layers))
        follow(
            self._starts,
            self._layers,
            self._experts,
            pool.num_slots,
            self._num_experts,
            pool.num_held * self._num_experts,
            np.array([pool.half_life, pool.num_classes, pool.near_share]),
            _seconds_of(costs),
            counts,
            seconds,
        )
        return PoolOutcome(counts, np.add.reduceat(seconds, self._firsts))


def _seconds_of(costs: Costs) -> np.ndarray:
    works = (costs.rest, costs.expert, costs.near)
    rest, expert, near = ([work.memory_s, work.token_s] for work in works)
    load_s = costs.load_s + costs.load_latency_s
    return np.array([*rest, *expert, load_s, *near, costs.contention, costs.near_step_s])
