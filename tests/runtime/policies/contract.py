"""The contract of every policy: any policy of the table, with any others, over any trace.

`routed` draws a trace, `keep_the_contract` runs policies over it and checks every decision on the
way.
"""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from artifacts.quantisation.replicas import Replicas
from artifacts.quantisation.widths import USUAL_WIDTHS, WIDTHS, columns_of
from artifacts.routing.expert_maps import ExpertMaps
from artifacts.routing.predictors import RECORDED
from artifacts.shape import Shape
from artifacts.traces.next_use import NextUse
from artifacts.traces.trace import DECODE, PREFILL, Trace
from runtime.control.build import build_controller, prepare
from runtime.control.cache import ABSENT, RESIDENT
from runtime.control.controller import Controller, distinct
from runtime.control.plan import NO_SLOT, Place, Plan
from runtime.policies import build, parse
from runtime.policies.base import Artefacts, FastTier, Step
from runtime.policies.presets import Scope
from runtime.policies.step import Opening
from runtime.replay.replay import replay

NBYTES = {16: 160, 4: 40, 3: 30, 2: 20, 1: 10}
PLAIN = {
    "routing": "standard",
    "prefetch": "none",
    "eviction": "lru",
    "miss": "fetch",
    "residency": "uniform",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A trace, the shape of its model, and the fast tier that it is to run in."""

    shape: Shape
    trace: Trace
    num_slots: int
    scope: Scope
    window: int
    num_devices: int = 1


@st.composite
def routed(draw: st.DrawFn) -> Case:
    """Draw requests one after another, each a prefill and some decode passes, then perhaps a batch
    of two. Capacities range from one slot a layer over `top_k` to all; half of the time scores are
    coarse, so that there are ties."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_layers = draw(st.integers(1, 4))
    num_experts = draw(st.integers(2, 9))
    top_k = draw(st.integers(1, min(3, num_experts)))
    shape = Shape(num_layers, num_experts, top_k, expert_nbytes=160)
    slots = draw(st.one_of(st.just(top_k), st.integers(1, num_experts)))
    passes = []
    for request in range(draw(st.integers(1, 3))):
        passes.append((PREFILL, [request] * draw(st.integers(1, 6))))
        passes += [(DECODE, [request])] * draw(st.integers(0, 4))
    passes += [(DECODE, [7, 8])] * draw(st.integers(0, 2))
    trace = _trace(shape, passes, rng, coarse=draw(st.booleans()))
    scope = draw(st.sampled_from(list(Scope)))
    return Case(shape, trace, slots * num_layers, scope, window=draw(st.integers(1, 800)))


def artefacts(shape: Shape, trace: Trace, maps: ExpertMaps | None = None) -> Artefacts:
    """Return everything that any policy requires; random maps unless given."""
    rng = np.random.default_rng(0)
    size = (shape.num_layers, shape.num_experts)
    buddies = np.stack(
        [[rng.permutation(size[1])[:3] for _ in range(size[1])] for _ in range(size[0])]
    )
    q = rng.random(buddies.shape)
    return Artefacts(
        buddies=buddies,
        buddy_q=q,
        coactivated=(buddies[:, ::-1], q),
        entropy=np.zeros((size[0], 101)),
        loads=-np.sort(-np.random.default_rng(2).random((size[0], size[1] + 1)), axis=1),
        sensitivity=np.linspace(0.5, 1.5, size[0]),
        next_use=NextUse.of(trace, shape),
        maps=maps or _maps(shape, trace),
        learns_maps=True,
        predictors=RECORDED,
        replicas=Replicas(NBYTES, *(_losses(rng, size) for _ in range(2)), rng.random(size)),
    )


def _losses(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Return losses [L, E, W] of the widths that there are; they fall with the width."""
    losses = np.full((*size, len(WIDTHS)), np.nan)
    losses[..., columns_of(USUAL_WIDTHS)] = np.sort(rng.random((*size, len(USUAL_WIDTHS))))[
        ..., ::-1
    ]
    return losses


def _maps(shape: Shape, trace: Trace) -> ExpertMaps:
    """Return a store for nine maps with four in it."""
    rng = np.random.default_rng(1)
    size = {
        "num_layers": shape.num_layers,
        "num_experts": shape.num_experts,
        "hidden": trace.embeddings.shape[1],
    }
    maps = ExpertMaps(9, **size, distance=1)
    maps.add(
        rng.normal(size=(4, size["hidden"])),
        rng.dirichlet(np.ones(shape.num_experts), (4, shape.num_layers)),
    )
    return maps


def run(case: Case, maps: ExpertMaps | None = None, **texts: str) -> Controller:
    """Replay the case with these policies and check nothing."""
    owner = built(case, texts, maps)
    replay(case.trace, owner)
    return owner


def keep_the_contract(case: Case, **texts: str) -> Controller:
    """Replay the case with these policies. Raises AssertionError when they, or the controller,
    break a rule."""
    owner = built(case, texts)
    replay(case.trace, _Checked(owner))
    totals = owner.counters.totals()
    assert totals["requests"] == totals["hits"] + totals["late"] + totals["misses"]
    assert totals["misses"] == totals["fetched"] + totals["near"] + totals["low"] + totals["spared"]
    assert totals["wasted_bytes"] <= totals["prefetch_bytes"]
    assert np.array_equal(owner.counters.passes, run(case, **texts).counters.passes), (
        "the same again, differently"
    )
    _check_order(owner)
    return owner


def built(
    case: Case, texts: dict[str, str], maps: ExpertMaps | None = None, *, serving: str = "pinned"
) -> Controller:
    """Build the case's controller. With resident replicas, the budget holds them at 4 bits beside
    the slots. Split experts have no replicas."""
    texts = PLAIN | texts
    if texts["miss"].startswith("shadow"):
        texts["residency"] = "shadow"
    if (
        texts["residency"].startswith("split")
        and "replicas" in parse("miss", texts["miss"]).requires
    ):
        texts["miss"] = PLAIN["miss"]
    if parse("routing", texts["routing"]).follows_predictions:
        texts["prefetch"] = "next_gate"
    policies = build(texts).with_ratio(lambda: 0.5)
    known = artefacts(case.shape, case.trace, maps)
    prepare(policies, case.shape, known)
    budget = case.num_slots * case.shape.expert_nbytes
    if texts["residency"].startswith("shadow"):
        budget += case.shape.num_keys * NBYTES[4]
    fast = policies.residency.share(budget) or FastTier(case.num_slots)
    return build_controller(
        policies,
        case.shape,
        num_slots=fast.num_slots,
        shadows=fast.shadows,
        split=fast.split,
        scope=case.scope,
        window=case.window,
        artefacts=known,
        num_devices=case.num_devices,
        serving=serving,
    )


class _Checked:
    """A controller whose every plan is checked. `cache.evict` itself asserts that no pinned or
    absent key is evicted."""

    def __init__(self, owner: Controller) -> None:
        self._owner = owner
        self.shape = owner.shape
        self.num_predicted = owner.num_predicted
        self.num_learned = owner.num_learned
        self.sees_embeddings = owner.sees_embeddings
        self.opens_passes = owner.opens_passes
        self.begin_pass = owner.begin_pass

    def open_pass(self, opening: Opening) -> tuple[Place, ...]:
        brought = self._owner.open_pass(opening)
        self._owner.validate()
        assert not self._owner.cache.pinned.any(), "pins without a step"
        _check_brought(brought, self._owner)
        return brought

    def step(self, step: Step) -> Plan:
        plan = self._owner.step(step)
        self._owner.cache.validate()
        assert not self._owner.cache.pinned.any(), "pins outlive their step"
        _check_ranks(plan, step, self.shape)
        _check_places(plan, self._owner, self.shape)
        _check_devices(plan, self._owner, self.shape)
        return plan


def _check_ranks(plan: Plan, step: Step, shape: Shape) -> None:
    assert plan.selected.shape == step.selected.shape
    assert ((plan.selected >= -1) & (plan.selected < shape.num_experts)).all()
    for experts in plan.selected.tolist():
        serving = [expert for expert in experts if expert >= 0]
        assert len(set(serving)) == len(serving), (
            f"one expert serves two ranks of a token: {experts}"
        )
    if plan.weights is not None:
        assert plan.weights.shape == step.weights.shape
        assert np.isfinite(plan.weights).all() and (plan.weights >= 0).all()


def _check_places(plan: Plan, owner: Controller, shape: Shape) -> None:
    """Check that every rank is served by a resident, near, low or dropped expert, split experts by
    their segments; that a wave fits the tier; and that the controller's state is valid."""
    used = [plan.layer * shape.num_experts + expert for expert in distinct(plan.selected)]
    used = owner._pieces.of(used)
    served = [place.key for wave in plan.waves for place in (*wave.resident, *wave.loads)]
    assert len(set(served)) == len(served)
    elsewhere = [place.key for place in (*plan.near, *plan.low)]
    assert sorted(served + elsewhere) == sorted(used)
    assert all(place.slot == NO_SLOT and place.bits in NBYTES for place in (*plan.near, *plan.low))
    for wave in plan.waves:
        slots = [place.slot for place in (*wave.resident, *wave.loads)]
        assert len(set(slots)) == len(slots) <= owner.cache.num_slots
        assert {place.bits for place in (*wave.resident, *wave.loads)} <= NBYTES.keys()
    _check_brought(plan.prefetches, owner)


def _check_brought(prefetches: tuple[Place, ...], owner: Controller) -> None:
    brought = [place.key for place in prefetches]
    assert len(set(brought)) == len(brought)
    assert all(
        0 <= key < owner.cache.num_keys and owner.cache.state[key] != ABSENT for key in brought
    )


def _check_devices(plan: Plan, owner: Controller, shape: Shape) -> None:
    """Check that experts are in their own device's slots only, counted pool by pool, and that the
    devices' counters add up."""
    pools = owner.cache.pools
    count = owner.cache.partitions.count
    device_of = [pool.device for pool in pools for _ in range(pool.num_slots)]
    there = [place for place in owner.cache.places if place]
    moved = [
        *plan.prefetches,
        *(place for wave in plan.waves for place in (*wave.resident, *wave.loads)),
    ]
    for place in (*there, *moved):
        assert device_of[place.slot] == place.key % shape.num_experts % count, place
    owner.counters.validate()


def _check_order(owner: Controller) -> None:
    """Check that every resident has a rank, and one value for every sort key."""
    keys = np.flatnonzero(owner.cache.state[: owner.shape.num_keys] == RESIDENT)
    for column in owner._eviction.order(keys, owner.now):
        assert column.shape == keys.shape
        assert not np.isnan(column.astype(np.float64)).any()


def _trace(shape: Shape, passes: list, rng: np.random.Generator, *, coarse: bool) -> Trace:
    rows = []
    seen = {}
    for number, (phase, requests) in enumerate(passes):
        tokens = []
        for request in requests:
            seen[request] = seen.get(request, -1) + 1
            tokens.append(seen[request])
        rows += [
            (r, number, phase, layer, t)
            for layer in range(shape.num_layers)
            for r, t in zip(requests, tokens, strict=True)
        ]
    size = (len(rows), shape.num_experts)
    logits = rng.integers(0, 3, size) if coarse else rng.normal(scale=2, size=size)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    experts = np.argsort(-logits, axis=1, kind="stable")[:, : shape.top_k]
    predicted, learned = rng.dirichlet(np.ones(size[1]), size=(2, len(rows), 3))
    request, pass_, phase, layer, token = np.array(rows, np.int32).T
    _, iteration = np.unique(request.astype(np.int64) << 32 | pass_, return_inverse=True)
    return Trace(
        request=request,
        pass_=pass_,
        phase=phase.astype(np.uint8),
        layer=layer,
        token=token,
        experts=experts.astype(np.uint16),
        weights=np.take_along_axis(probabilities, experts, axis=1).astype(np.float32),
        probabilities=probabilities.astype(np.float32),
        predicted=predicted.astype(np.float32),
        learned=learned.astype(np.float32),
        iteration=iteration.astype(np.int32),
        embeddings=rng.normal(size=(iteration.max() + 1, 3)).astype(np.float32),
        foretold=np.where(rng.random((len(rows), 1)) < 0.6, experts[:, ::-1], -1).astype(np.int32),
    )
