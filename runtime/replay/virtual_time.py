"""Virtual time: when the steps of a replay would begin and end on a described machine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from artifacts.hardware.costs import Costs, Work
from artifacts.quantisation.widths import NOTHING
from artifacts.shape import FULL_BITS
from runtime.control.plan import NO_SLOT, Place, Plan


@dataclass(slots=True)
class PassTime:
    """One pass, `num_decoded` of whose tokens are decoded and stay, beside drafts and others that
    were read in vain, `num_vain`; `num_heads` pass the head. Of its `seconds` compute waited
    `stall_s` for the link; the near tier computed for `near_s`."""

    num_tokens: int
    num_decoded: int
    num_heads: int = 1
    num_vain: int = 0
    seconds: float = 0.0
    stall_s: float = 0.0
    near_s: float = 0.0

    @property
    def decodes(self) -> bool:
        return self.num_decoded + self.num_vain > 0


class ReplayTiming:
    """Times the plans of a replay. Resident experts are computed one after another, each arrival
    once it has arrived, near experts at the same time, and more slowly while the link is busy where
    both read the same memory; the step ends with its last expert."""

    def __init__(self, costs: Costs, num_experts: int, nbytes: Mapping[int, int]) -> None:
        """`nbytes`: size of an expert, by bits."""
        self.passes: list[PassTime] = []
        self._costs = costs
        self._num_experts = num_experts
        self._share = {bits: size / nbytes[FULL_BITS] for bits, size in nbytes.items()}
        self._fast_share = {**self._share, **costs.shares}
        # it is computed as the narrowest, on zeros
        self._fast_share[NOTHING] = min(self._fast_share.values())
        self._link = _Link()
        self._pending: dict[int, _Transfer] = {}  # by slot
        self._now_s = 0.0

    def begin_pass(
        self, num_tokens: int, *, num_decoded: int, num_heads: int = 1, num_vain: int = 0
    ) -> None:
        """Begin a pass, and end the one before if there is one."""
        if self.passes:
            self.end_pass()
        self.passes.append(PassTime(num_tokens, num_decoded, num_heads, num_vain))
        self._begin_s = self._now_s

    def open_pass(self, prefetches: tuple[Place, ...]) -> None:
        """Issue what is prefetched before the first layer."""
        self._issue(prefetches, is_demand=False)

    def end_pass(self) -> None:
        """End the pass with the head, which is computed for decoded tokens and the last of each
        prompt only."""
        self._now_s += self._costs.head.seconds(self.passes[-1].num_heads)
        self.passes[-1].seconds = self._now_s - self._begin_s

    def step(self, plan: Plan) -> None:
        """Time one layer: its other parts first, then its experts."""
        self._now_s += self._costs.rest.seconds(len(plan.selected))
        tokens = _tokens_by_expert(plan.selected, self._num_experts)
        near_s = sum(
            self._seconds(self._costs.near, place, tokens, self._share) for place in plan.near
        )
        near_s += self._costs.near_step_s if plan.near else 0.0
        host_s = sum(
            self._seconds(self._costs.near_host, place, tokens, self._fast_share)
            for place in plan.near
        )
        begin_s = self._now_s
        self.passes[-1].near_s += max(near_s, host_s)
        self._issue(plan.placed, is_demand=False)
        if plan.is_ahead or not plan.waves:
            self._issue(plan.prefetches, is_demand=False)
        if plan.waves:
            self._issue(plan.waves[0].loads, is_demand=True)
        self._compute(plan.low, tokens, {})
        waves = plan.waves
        for wave, after in zip(waves, (*waves[1:], None), strict=False):
            following = {load.slot: load for load in after.loads} if after else {}
            if wave is plan.waves[-1] and not plan.is_ahead:
                self._issue(plan.prefetches, is_demand=False)
            self._compute((*wave.resident, *wave.loads), tokens, following, near_s=host_s)
            host_s = 0.0
            self._issue(tuple(following.values()), is_demand=True)
        near_s = self._beside_link(near_s, begin_s)
        self._now_s = max(self._now_s + host_s, begin_s + near_s)

    def _beside_link(self, near_s: float, begin_s: float) -> float:
        """Return the seconds in which the near tier does the work of `near_s` from `begin_s` on, if
        both read the same memory: while the link is busy, it computes more slowly."""
        lost = self._costs.contention
        if not lost or not near_s:
            return near_s
        return near_s + lost * min(self._link.busy_s(begin_s), near_s / (1 - lost))

    def summary(self) -> dict[str, float | None]:
        """Return milliseconds of a pass that only reads prompts, and of a pass that decodes,
        decoded tokens per second of the latter, all exposed stalls, and the near tier's
        milliseconds per pass that decodes. A value is None when the trace has no such pass."""
        prefill_s = [pass_time.seconds for pass_time in self.passes if not pass_time.decodes]
        decode = [pass_time for pass_time in self.passes if pass_time.decodes]
        decode_s = sum(pass_time.seconds for pass_time in decode)
        return {
            "ttft_ms": fmean(prefill_s) * 1e3 if prefill_s else None,
            "tpot_ms": decode_s / len(decode) * 1e3 if decode else None,
            "tokens_per_s": sum(pass_time.num_decoded for pass_time in decode) / decode_s
            if decode_s
            else None,
            "exposed_ms": sum(pass_time.stall_s for pass_time in self.passes) * 1e3,
            "near_ms": fmean(pass_time.near_s for pass_time in decode) * 1e3 if decode else None,
        }

    def ends_s(self) -> np.ndarray:
        """Return when each pass ended [P]."""
        return np.cumsum([pass_time.seconds for pass_time in self.passes])

    def _compute(
        self,
        places: tuple[Place, ...],
        tokens: list[int] | None,
        following: dict[int, Place],
        *,
        near_s: float = 0.0,
    ) -> None:
        """Compute resident experts, then near ones for `near_s`, then arrivals in the order of
        arrival; each slot is free for its `following` load once its expert is computed."""
        self._link.advance(self._now_s)
        coming = []
        for place in places:
            transfer = self._pending.pop(place.slot, None) if place.slot != NO_SLOT else None
            if transfer is not None and transfer.lands_s > self._now_s:
                coming.append((place, transfer))
                continue
            self._take(place, transfer)
            self._compute_one(place, tokens, following)
        self._now_s += near_s
        for _, transfer in coming:
            self._link.hurry(transfer)
        for place, transfer in sorted(coming, key=lambda pair: pair[1].lands_s):
            self._take(place, transfer)
            self._compute_one(place, tokens, following)

    def _take(self, place: Place, transfer: "_Transfer | None") -> None:
        """Wait for a transfer, if there is one, and take what it brings."""
        if transfer is None:
            return
        self._now_s += self._costs.copy_s * place.share * self._share[place.bits]
        if transfer.lands_s > self._now_s:
            ends_s = transfer.lands_s + self._costs.wake_s
            self.passes[-1].stall_s += ends_s - self._now_s
            self._now_s = ends_s
        self._now_s += self._costs.demand_s if transfer.is_demand else 0.0

    def _compute_one(
        self, place: Place, tokens: list[int] | None, following: dict[int, Place]
    ) -> None:
        self._now_s += self._expert_seconds(place, tokens)
        if load := following.pop(place.slot, None):
            self._issue((load,), is_demand=True)

    def _expert_seconds(self, place: Place, tokens: list[int] | None) -> float:
        return self._seconds(self._costs.expert, place, tokens, self._fast_share)

    def _seconds(
        self, work: Work, place: Place, tokens: list[int] | None, shares: Mapping[int, float]
    ) -> float:
        num_tokens = 1 if tokens is None else tokens[place.key % self._num_experts]
        return place.share * work.seconds(num_tokens, share=shares[place.bits])

    def _issue(self, loads: tuple[Place, ...], *, is_demand: bool) -> None:
        for place in loads:
            if place.slot in self._pending:
                self._link.cancel(self._pending.pop(place.slot))
            self._now_s += self._costs.host_s
            share = self._share[place.bits] * (1.0 if self._costs.reads_whole else place.share)
            seconds = self._costs.load_latency_s + self._costs.load_s * share
            self._pending[place.slot] = self._link.issue(self._now_s, seconds, is_demand=is_demand)


@dataclass(eq=False, slots=True)
class _Transfer:
    issued_s: float
    seconds: float
    is_demand: bool
    is_started: bool = False
    lands_s: float = math.inf  # until it has started


@dataclass(slots=True)
class _Link:
    """One transfer at a time. A demand load goes behind the transfer in flight and before all
    prefetches that have not started."""

    free_s: float = 0.0
    prefetches: list[_Transfer] = field(default_factory=list)

    def issue(self, now_s: float, seconds: float, *, is_demand: bool) -> _Transfer:
        transfer = _Transfer(now_s, seconds, is_demand)
        self.advance(now_s)
        if is_demand:
            self._start(transfer)
        else:
            self.prefetches.append(transfer)
        return transfer

    def advance(self, now_s: float) -> None:
        """Start every prefetch that begins before `now_s`."""
        while self.prefetches and max(self.free_s, self.prefetches[0].issued_s) < now_s:
            self._start(self.prefetches.pop(0))

    def busy_s(self, since_s: float) -> float:
        """Return the seconds of transfers from `since_s` on, those that wait included."""
        waiting = sum([transfer.seconds for transfer in self.prefetches])
        return max(0.0, self.free_s - since_s) + waiting

    def hurry(self, transfer: _Transfer) -> None:
        """Start a transfer that compute waits for, before all other prefetches."""
        if not transfer.is_started:
            self.prefetches.remove(transfer)
            self._start(transfer)

    def cancel(self, transfer: _Transfer) -> None:
        """Take a transfer off the queue; one that has started is completed."""
        if not transfer.is_started:
            self.prefetches.remove(transfer)

    def _start(self, transfer: _Transfer) -> None:
        self.free_s = max(self.free_s, transfer.issued_s) + transfer.seconds
        transfer.is_started = True
        transfer.lands_s = self.free_s


def _tokens_by_expert(selected: np.ndarray, num_experts: int) -> list[int] | None:
    """Return the tokens [E] of each expert; None for a single token, where every selected expert
    has one."""
    if len(selected) == 1:
        return None
    return np.bincount(selected[selected >= 0], minlength=num_experts).tolist()
