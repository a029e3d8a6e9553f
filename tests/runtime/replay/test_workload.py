"""Settings replayed on one workload: what the store has, what is assumed, and the bounds."""

from dataclasses import replace

import numpy as np
import pytest

from artifacts.errors import BadInput
from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import ModelShape
from artifacts.routing.buddies import buddy_lists
from artifacts.routing.coactivation import Coactivation, conditional
from artifacts.shape import Shape
from artifacts.traces.synthetic import Dials, generate
from runtime.policies.base import Artefacts
from runtime.replay import from_trace as derived
from runtime.replay.settings import Setting, oracles
from runtime.replay.workload import Workload

SHAPE = Shape(num_layers=3, num_experts=12, top_k=3, expert_nbytes=3 * 64 * 32 * 2)
MODEL = ModelShape("small", SHAPE, hidden=64, vocabulary=100)
TRACE = generate(Dials(tokens=120, requests=3, prompt=8), SHAPE)
MACHINE = machine("a100-pcie4")


def workload(**changed: object) -> Workload:
    return Workload(**{"trace": TRACE, "model": MODEL, "machine": MACHINE} | changed)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_the_bounds_bound(scope: str) -> None:
    tried = workload()
    setting = Setting("lru", scope=scope, budget="50%")
    plain, belady, oracle = (tried.run(one) for one in (setting, *oracles(setting)))
    assert {outcome.scope for outcome in (plain, belady, oracle)} == {scope}
    assert belady.counters["hits"] > plain.counters["hits"]
    assert oracle.counters["misses"] <= belady.counters["misses"]
    assert oracle.window > 0 == plain.window
    assert tried.assumed == []


def test_a_budget_for_everything_leaves_nothing_to_load_twice() -> None:
    outcome = workload().run(Setting("full", "full"))
    assert outcome.num_slots == SHAPE.num_keys
    assert outcome.counters["evictions"] == outcome.counters["collisions"] == 0
    assert outcome.counters["demand_bytes"] == outcome.counters["misses"] * SHAPE.expert_nbytes


def test_what_the_store_knows_goes_before_what_is_counted() -> None:
    """With one stored buddy each instead of those counted in the trace, fewer ranks find a
    stand-in."""
    setting = Setting("buddy", policies={"miss": "buddy"}, budget="25%")
    counted = workload()
    stored = None
    first = counted.run(setting)
    assert len(counted.assumed) == 2
    buddies = np.tile((np.arange(12) + 1) % 12, (3, 1))[:, :, None]
    artefacts = Artefacts(
        buddies=buddies, buddy_q=np.ones(buddies.shape), entropy=np.zeros((3, 101))
    )
    stored = workload(artefacts=artefacts)
    assert stored.run(setting).counters["replaced_ranks"] < first.counters["replaced_ranks"]
    assert stored.assumed == []
    counted.run(setting)
    assert len(counted.assumed) == 2, "said once"


def test_stored_lists_do_not_pass_for_lists_by_coactivation() -> None:
    none = np.full((3, 12, 1), -1)
    artefacts = Artefacts(buddies=none, buddy_q=np.zeros(none.shape), entropy=np.zeros((3, 101)))
    tried = workload(artefacts=artefacts)
    outcomes = [
        tried.run(Setting(miss, policies={"miss": miss}, budget="25%"))
        for miss in ("buddy", "buddy:metric=coactivation")
    ]
    replaced = [outcome.counters["replaced_ranks"] for outcome in outcomes]
    assert replaced[0] == 0 < replaced[1]
    assert tried.assumed == ["buddy lists are counted in the trace that is replayed"]


def test_buddies_are_those_that_the_command_would_build() -> None:
    lists, q = derived.buddies(TRACE, SHAPE)
    for layer in range(SHAPE.num_layers):
        counts = Coactivation(SHAPE.num_experts)
        at = TRACE.layer == layer
        counts.update(TRACE.experts[at], TRACE.weights[at])
        wanted = buddy_lists(conditional(counts.pairs), 0.95, 16)
        assert [row[row >= 0].tolist() for row in lists[layer]] == wanted
        assert (q[layer][lists[layer] < 0] == 0).all() and (q[layer].sum(axis=1) > 0.94).all()
    assert derived.entropy(TRACE, SHAPE).shape == (3, 101)


def test_replicas_cost_their_share_of_the_link() -> None:
    tried = workload()
    whole = tried.run(Setting("fetch", budget="25%"))
    low = tried.run(Setting("lowest", policies={"miss": "fetch_lowest"}, budget="25%"))
    assert low.counters["misses"] == whole.counters["misses"]
    assert low.counters["demand_bytes"] < whole.counters["demand_bytes"] / 4
    assert low.times["tpot_ms"] < whole.times["tpot_ms"]


def test_8_bits_are_assumed_where_a_policy_names_them_and_nowhere_else() -> None:
    tried = workload()
    eight = {"miss": "fetch_priority:bits=8"}
    shadow = {"miss": "shadow", "residency": "shadow:bits=8,slots=no"}
    assert tried.run(Setting("eight", policies=eight, budget="25%")).counters["at_8_bits"] > 0
    assert tried.run(Setting("all", policies=shadow, budget="60%")).counters["at_8_bits"] > 0
    mixed = tried.run(Setting("mixed", "shadow", budget="90%"))
    assert mixed.counters["at_8_bits"] == 0 < mixed.counters["at_4_bits"] and mixed.num_slots > 0


def test_what_stays_in_the_fast_tier_counts_its_bytes() -> None:
    tried = workload()
    half = SHAPE.nbytes // 2
    assert tried.run(Setting("plain", budget="50%")).fast_nbytes == half
    shadow = tried.run(Setting("shadow", "shadow", budget="50%"))
    assert shadow.num_slots * SHAPE.expert_nbytes < shadow.fast_nbytes <= half


def test_a_trace_that_cannot_be_this_model_is_refused() -> None:
    with pytest.raises(BadInput, match="it is another model's"):
        workload(model=replace(MODEL, shape=replace(SHAPE, num_layers=4)))
    with pytest.raises(BadInput, match="but a layer has only 4 experts"):
        workload(model=replace(MODEL, shape=replace(SHAPE, num_experts=4)))


def test_a_trace_whose_layers_count_from_one() -> None:
    later = TRACE.take(np.flatnonzero(TRACE.layer > 0))
    tried = workload(trace=later)
    assert tried.assumed == [
        "layers 0 never occur in the trace and have their share of the budget all the same"
    ]
    assert tried.run(Setting("buddymoe", "buddymoe")).by_layer[0]["requests"] == 0


def test_a_token_that_selects_an_expert_twice() -> None:
    """The selection counts once, but an expert cannot be its own buddy."""
    experts = TRACE.experts.copy()
    experts[5] = experts[5, 0]
    tried = workload(trace=replace(TRACE, experts=experts))
    assert tried.run(Setting("lru")).counters["requests"] > 0
    with pytest.raises(BadInput, match="selects an expert twice"):
        tried.run(Setting("buddymoe", "buddymoe"))
