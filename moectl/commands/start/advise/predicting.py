"""Prediction of an engine's tokens a second on a placement, from a replay of a trace at a machine's
rates."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import Machine
from artifacts.modelshapes.known import ModelShape
from artifacts.shape import Shape
from artifacts.traces.trace import DECODE, Trace
from moectl.commands.start.advise.engines import AdvisedEngine, ExpertPlacement
from moectl.commands.start.plan.needs import Needs
from runtime.replay.drafting import Drafts, verified
from runtime.replay.pool import PoolOutcome, SlotPool, Steps

NEAR_STEP_S = 40e-6
"""Assumed, of a layer that the CPU computes a part of: its inputs and outputs over the link, and
waiting for each other."""

LAUNCHES_S = 25e-6
"""Assumed, of the kernels of a layer on a GPU."""


@dataclass(frozen=True, slots=True)
class RateSpread:
    """The part of a stated rate that runs get: usual, least and most."""

    usual: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.usual:.0%} ({100 * self.least:.0f} to {self.most:.0%})"


@dataclass(frozen=True, slots=True)
class Reached:
    """The parts of a machine's rates that an engine gets, all of them assumed."""

    fast: RateSpread = RateSpread(0.7, 0.5, 0.9)
    link: RateSpread = RateSpread(0.95, 0.8, 1.0)
    near: RateSpread = RateSpread(0.85, 0.6, 1.0)

    def __str__(self) -> str:
        return (
            f"of which runs get {self.fast} of the GPU's, {self.link} of the link's, {self.near} "
            "of the CPU's: assumed"
        )

    def of(self, machine: Machine, which: str) -> Machine:
        """Return the machine at its `usual`, `least` or `most` rates."""
        fast, link, near = (getattr(each, which) for each in (self.fast, self.link, self.near))
        return replace(
            machine,
            fast_gbps=machine.fast_gbps * fast,
            fast_tflops=machine.fast_tflops * fast,
            link_gbps=machine.link_gbps * link,
            near_gbps=machine.near_gbps * near,
            near_tflops=machine.near_tflops * near,
            ram_gbps=machine.ram_gbps and machine.ram_gbps * near,
        )


@dataclass(frozen=True, slots=True)
class SpeedPrediction:
    """Predicted tokens a second of one request at a time, and the interval from `low` to `high`.

    `limit` is the rate at which the same bytes could be read at the machine's own rates, all
    channels at once. `hit_rate` is that of the experts wanted in layers that are not whole on the
    GPU. `loaded_nbytes` a token come over the link. `grounds` tells the assumptions behind misses
    and times.
    """

    tokens_per_second: float
    low: float
    high: float
    limit: float
    hit_rate: float
    loaded_nbytes: float
    grounds: tuple[str, ...]

    @property
    def of_limit(self) -> float:
        return self.tokens_per_second / self.limit


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedTrace:
    """The decoding of a trace for a model: its own, or another's of which each layer, and each pool
    of the same share of its experts, stands for the model's. `uses` [L * E] counts those of the
    first half of its requests; `num_drafts` are verified in each pass. `is_own`: the trace is of
    this model."""

    trace: Trace
    steps: Steps
    shape: Shape
    uses: np.ndarray
    num_tokens: int
    says: str
    is_own: bool = True
    num_drafts: int = 0

    @classmethod
    def of(
        cls, trace: Trace, num_experts: int, says: str, *, is_own: bool = True
    ) -> "ReplayedTrace":
        decoded = trace.take(np.flatnonzero(trace.phase == DECODE))
        shape = Shape(trace.num_layers, num_experts, trace.top_k, 1)
        early = decoded.request <= np.median(np.unique(decoded.request))
        keys = decoded.layer[early, None] * num_experts + decoded.experts[early]
        uses = np.bincount(keys.ravel(), minlength=shape.num_keys)
        num_tokens = len(decoded) // shape.num_layers
        steps = Steps(decoded, num_experts)
        return cls(decoded, steps, shape, uses, num_tokens, says, is_own)

    def even(self) -> "ReplayedTrace":
        """Return the same passes of a router that wants all experts equally often."""
        draws = np.random.default_rng(0).random((len(self.trace), self.shape.num_experts))
        experts = np.argpartition(draws, self.shape.top_k, axis=1)[:, : self.shape.top_k]
        steps = Steps(replace(self.trace, experts=experts.astype(np.uint16)), draws.shape[1])
        return replace(self, steps=steps)


@cache
def drafted(trace: ReplayedTrace, length: int, acceptance: float) -> ReplayedTrace:
    """Return the same tokens computed with `length` drafts a pass. The engines note what a rejected
    draft wants as used, as they cannot know better when they read it."""
    passes = replace(verified(trace.trace, length, Drafts((acceptance,))), rejected=None)
    return replace(trace, steps=Steps(passes, trace.shape.num_experts), num_drafts=length)


def predict(
    needs: Needs,
    machine: Machine,
    placement: ExpertPlacement,
    engine: AdvisedEngine,
    trace: ReplayedTrace,
    *,
    reached: Reached = Reached(),
) -> SpeedPrediction:
    """Predict the speed of decoding, one request at a time.

    The interval is that of the rates, all low or all high, times that of the trace's requests (90 %
    of resamplings); of a trace of another model it begins where experts are wanted equally often.
    """

    def tried(which: str, trace: ReplayedTrace = trace) -> "_Try":
        return _tried(needs, reached.of(machine, which), placement, engine, trace)

    usual = tried("usual")
    low, high = _of_requests(trace, usual.seconds)
    least = low * tried("least").rate
    if not trace.is_own:
        least = min(least, tried("least", trace.even()).rate)
    return SpeedPrediction(
        usual.rate,
        least,
        tried("most").rate * high,
        _limit(needs, machine, placement, engine, trace, usual),
        _hit_rate(usual, placement, trace),
        int(usual.counts[-1])
        / trace.num_tokens
        * _stands_for_nbytes(needs.model.shape, trace.shape),
        _grounds(trace, machine, engine, reached),
    )


def _hit_rate(tried: "_Try", placement: ExpertPlacement, trace: ReplayedTrace) -> float:
    wanted, misses, _, _ = tried.counts.tolist()
    outside = wanted * (1 - _num_held(placement, trace) / trace.shape.num_layers)
    return 1 - misses / outside if outside else 1.0


def _grounds(
    trace: ReplayedTrace, machine: Machine, engine: AdvisedEngine, reached: Reached
) -> tuple[str, str]:
    worst = "" if trace.is_own else "; at worst wanted evenly"
    return (
        f"misses: {trace.says}; on the GPU: {engine.keeps}{worst}",
        f"times: {machine.name}'s figures, {reached}",
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Try:
    """A replay: `counts` over all steps, `seconds` of each pass, tokens a second."""

    counts: np.ndarray
    seconds: np.ndarray
    rate: float


def tried_rate(
    needs: Needs,
    machine: Machine,
    placement: ExpertPlacement,
    engine: AdvisedEngine,
    trace: ReplayedTrace,
) -> float:
    """Return the tokens a second alone, from one replay."""
    return _tried(needs, Reached().of(machine, "usual"), placement, engine, trace).rate


def _tried(
    needs: Needs,
    machine: Machine,
    placement: ExpertPlacement,
    engine: AdvisedEngine,
    trace: ReplayedTrace,
) -> _Try:
    costs = _costs(needs, machine, placement, engine, trace.shape)
    outcome = trace.steps.through(_pool(needs.model, placement, engine, trace), costs)
    seconds = _pass_seconds(outcome, costs, needs.model.shape, trace)
    return _Try(outcome.counts.sum(axis=0), seconds, trace.num_tokens / float(seconds.sum()))


def _costs(
    needs: Needs, machine: Machine, placement: ExpertPlacement, engine: AdvisedEngine, shape: Shape
) -> Costs:
    """Return the costs of an expert of the trace, K of which are a token's."""
    if placement.is_on_cpu:
        rates = {"fast_gbps": machine.near_gbps, "fast_tflops": machine.near_tflops}
        machine = replace(machine, **rates)
    costs = Costs.of(needs.model, machine)
    stored = _stored_share(needs, engine)
    rest = costs.rest.scaled(stored)
    launches_s = 0.0 if placement.is_on_cpu else LAUNCHES_S
    each = needs.model.shape.top_k / shape.top_k
    return replace(
        costs,
        rest=replace(rest, memory_s=rest.memory_s + launches_s),
        head=costs.head.scaled(stored),
        expert=costs.expert.scaled(each),
        load_s=costs.load_s * each,
        near=costs.near.scaled(each),
        near_step_s=0.0 if placement.is_on_cpu else NEAR_STEP_S,
    )


def _stored_share(needs: Needs, engine: AdvisedEngine) -> float:
    """Return the bytes of weights besides experts over those in the model's own dtype."""
    if not engine.has_stored_weights:
        return 1.0
    memory = needs.memory
    return memory.as_stored().weights_nbytes / memory.weights_nbytes


def _num_held(placement: ExpertPlacement, trace: ReplayedTrace) -> int:
    """Return the layers of the trace that stand for those that are whole on the GPU; on a CPU all
    are where they are computed."""
    return round((1.0 if placement.is_on_cpu else placement.share) * trace.shape.num_layers)


def _pool(
    model: ModelShape, placement: ExpertPlacement, engine: AdvisedEngine, trace: ReplayedTrace
) -> SlotPool:
    shape = trace.shape
    slots = int(placement.cache_nbytes / model.shape.nbytes * shape.num_keys)
    first = (shape.num_layers - _num_held(placement, trace)) * shape.num_experts
    held = np.arange(shape.num_keys) >= first
    pinned = int(placement.pinned_nbytes / model.shape.nbytes * shape.num_keys)
    held[np.argsort(-trace.uses, kind="stable")[:pinned]] = True
    return SlotPool(slots, placement.near_share, held, num_classes=engine.num_classes)


def _pass_seconds(
    outcome: PoolOutcome, costs: Costs, shape: Shape, trace: ReplayedTrace
) -> np.ndarray:
    """Return the seconds of each pass [P]. A draft is made by one layer more and the head, as an
    MTP layer is, on the GPU."""
    layers_s = outcome.seconds * shape.num_layers / trace.shape.num_layers
    draft_s = costs.rest.seconds(1) + trace.shape.top_k * costs.expert.seconds(1)
    draft_s = trace.num_drafts * (draft_s + costs.head.seconds(1))
    heads = np.array([costs.head.seconds(number) for number in trace.steps.num_tokens.tolist()])
    return layers_s + heads + draft_s


def _of_requests(trace: ReplayedTrace, seconds: np.ndarray) -> tuple[float, float]:
    """Return by how much the rate differs between choices of as many requests: 5 % and 95 % of a
    thousand resamplings."""
    tokens = np.unique(trace.trace.request, return_counts=True)[1]
    _, request = np.unique(trace.steps.request, return_inverse=True)
    spent = np.bincount(request, seconds)
    drawn = np.random.default_rng(0).integers(len(tokens), size=(1000, len(tokens)))
    rates = tokens[drawn].sum(axis=1) / spent[drawn].sum(axis=1)
    low, high = np.quantile(rates / (tokens.sum() / spent.sum()), [0.05, 0.95])
    return float(low), float(high)


def _limit(
    needs: Needs,
    machine: Machine,
    placement: ExpertPlacement,
    engine: AdvisedEngine,
    trace: ReplayedTrace,
    tried: _Try,
) -> float:
    """Return the tokens a second if each channel moved its bytes at its full rate, all at once."""
    wanted, _, near, loads = (tried.counts / trace.num_tokens).tolist()
    each = _stands_for_nbytes(needs.model.shape, trace.shape)
    passes = len(tried.seconds) / trace.num_tokens  # of which each reads the other weights
    gpu = _other_nbytes(needs, engine) * passes + (wanted - near) * each
    channels = (
        (gpu, _weights_gbps(machine, placement)),
        (loads * each, machine.link_gbps),
        (near * each, machine.near_gbps),
        ((near + loads) * each, machine.ram_gbps or machine.near_gbps + machine.link_gbps),
    )
    return 1e9 / max(nbytes / gbps for nbytes, gbps in channels)


def _weights_gbps(machine: Machine, placement: ExpertPlacement) -> float:
    """Return the rate at which the weights besides misses are read."""
    return machine.near_gbps if placement.is_on_cpu else machine.fast_gbps


def _stands_for_nbytes(shape: Shape, replayed: Shape) -> float:
    """Return the bytes of the model for which an expert of the replayed trace stands."""
    selected = shape.top_k / replayed.top_k
    return shape.expert_nbytes * selected * (shape.num_layers / replayed.num_layers)


def _other_nbytes(needs: Needs, engine: AdvisedEngine) -> float:
    """Return the bytes of weights besides routed experts that a pass reads."""
    model = needs.model
    layers_nbytes = model.shape.num_layers * (model.attention_nbytes + model.shared_nbytes)
    head_nbytes = 2 * model.vocabulary * model.hidden
    return _stored_share(needs, engine) * (layers_nbytes + head_nbytes)
