"""Splits solved on a trace: the fastest of several by replay, used when the store has none that
fits."""

from dataclasses import replace

import numpy as np
import pytest

from artifacts.errors import BadInput
from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import ModelShape
from artifacts.shape import Shape
from artifacts.splits.solve import EVEN, SOLVERS, SolvedSplit
from artifacts.traces.synthetic import Dials, generate
from runtime.control.counters import hit_rate
from runtime.control.splits import split_solver as solving
from runtime.policies import parse
from runtime.policies.base import Artefacts
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload

SHAPE = Shape(num_layers=3, num_experts=12, top_k=3, expert_nbytes=3 * 64 * 32 * 2)
MODEL = ModelShape("small", SHAPE, hidden=64, vocabulary=100)
TRACE = generate(Dials(tokens=120, requests=3, prompt=8), SHAPE)
MACHINE = replace(machine("a6000-pcie4"), link_latency_s=0.0, link_gbps=100.0)
LCP = parse("eviction", "lcp")
STRICT = Setting("split", "moepic", {"residency": "split:theta=None"}, budget="30%")


def workload(**changed: object) -> Workload:
    return Workload(**{"trace": TRACE, "model": MODEL, "machine": MACHINE} | changed)


def stored(theta: float, budget: float, name: str = MACHINE.name) -> Artefacts:
    nbytes = int(budget * SHAPE.nbytes)
    each = np.full(3, budget * SHAPE.num_experts)
    return Artefacts(splits=(SolvedSplit(nbytes, name, each, np.full(3, theta), source="run 7"),))


def test_no_candidate_replays_faster() -> None:
    tried = workload()
    outcome = tried.run(STRICT)
    split = tried.solved(STRICT)
    candidates = solving.candidates(tried.curves(LCP), SHAPE, split)
    assert [one.solver for one in candidates] == [*SOLVERS, *[EVEN] * 5]
    for one in candidates:
        other = workload(artefacts=Artefacts(splits=(one,))).run(STRICT)
        assert outcome.times["tpot_ms"] <= other.times["tpot_ms"] + 1e-9, one.theta
    [note] = tried.assumed
    assert (
        note.startswith("the split of 30% is solved on the trace that is replayed (")
        and split.source in note
    )
    assert outcome.split["solved"] == split.source


def test_what_the_store_holds_goes_first_if_it_fits() -> None:
    tried = workload(artefacts=stored(0.4, 0.3))
    assert tried.run(STRICT).split["solved"] == "run 7" and tried.assumed == []
    for artefacts in (stored(0.4, 0.5), stored(0.4, 0.3, "5gbps")):
        tried = workload(artefacts=artefacts)
        assert "by replay" in tried.run(STRICT).split["solved"] and len(tried.assumed) == 1


def test_moepic_prefers_a_solved_split_and_says_what_it_does_without() -> None:
    setting = Setting("moepic", "moepic", budget="30%")
    assert "by replay" in workload().run(setting).split["solved"]
    blind = workload(trace=replace(TRACE, predicted=None))
    plain = replace(setting, policies={"prefetch": "none"})
    outcome = blind.run(plain)
    assert outcome.split["solved"] == "no" and outcome.split["theta"] == "0.5 0.5 0.5"
    assert [line.split(":")[0] for line in blind.assumed] == [
        "no split is solved",
        "no split was solved for this budget on this machine",
    ]
    with pytest.raises(BadInput, match="does not hold what routers predict"):
        blind.run(replace(plain, policies={"prefetch": "none", "residency": "split:theta=None"}))


@pytest.mark.parametrize("eviction", ["lcp:rho=0.5,omega=8,uses=tokens", "lcp", "lfu"])
def test_curves_are_of_caches_that_evict_as_the_run_does(eviction: str) -> None:
    """Several requests at a time, so that uses by token are not those by pass."""
    decoding = workload(trace=generate(Dials(tokens=90, requests=6, prompt=0, batch=3), SHAPE))
    curves = decoding.curves(parse("eviction", eviction))
    for held in (3, 6, 9):
        setting = Setting(
            "", policies={"eviction": eviction}, scope="layer", budget=f"{held * SHAPE.num_layers}x"
        )
        outcome = decoding.run(setting)
        rate = np.average(curves.hit[:, held], weights=curves.requests)
        assert rate == pytest.approx(hit_rate(outcome.counters), abs=1e-12)
    assert (curves.hit == decoding.curves(LCP).hit).all() == (eviction == "lcp")


def test_layers_get_their_slots_by_the_trace() -> None:
    tried = workload()
    setting = Setting("allocated", "mixtral-offloading", {"residency": "allocated"}, budget="30%")
    assert tried.run(setting).num_slots == 10 and tried.assumed == [
        "curves, by which layers get their slots, are measured in the trace that is replayed"
    ]
    blind = workload(trace=replace(TRACE, predicted=None))
    blind.run(replace(setting, policies={"residency": "allocated", "prefetch": "none"}))
    assert [line.split(":")[0] for line in blind.assumed] == [
        "no curves are measured",
        "no curves are stored",
    ]


def test_an_answer_says_what_the_model_makes_of_a_split() -> None:
    tried = workload()
    unsolved = SolvedSplit(SHAPE.nbytes // 3, "x", np.empty(0), np.empty(0), tried.latencies)
    by_solver = solving.solved_anew(tried.curves(LCP), SHAPE, unsolved)
    budgets, exposed, theta, sizes = solving.answer_of(tried.curves(LCP), SHAPE, by_solver)
    again = solving.solve(
        tried.curves(LCP), SHAPE, SHAPE.nbytes // 3, tried.latencies, solver="dynamic", zeta=0.01
    )
    for mine, found in zip((budgets, exposed, theta, sizes), again, strict=True):
        np.testing.assert_allclose(mine, found)
