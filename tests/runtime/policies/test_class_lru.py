"""Class LRU beside a replay that is written from its rule alone."""

from math import floor, log2

import pytest

from artifacts.errors import BadUsage
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import Trace
from runtime.policies import parse
from runtime.policies.presets import Scope
from tests import TRACE
from tests.runtime.policies.contract import Case, run
from tools.make.golden import SHAPE


def replayed(trace: Trace, num_slots: int) -> int:
    """Return the hits of one pool over all layers: dictionaries, and a search through all keys for
    each victim."""
    clocks = [0] * SHAPE.num_layers
    counts, used_at, used_in, classes = {}, {}, {}, {}
    held = set()
    hits = 0
    for number, step in enumerate(trace.steps()):
        layer = step.layer
        tokens = step.experts.tolist()
        clocks[layer] += len(tokens)
        wanted = list(dict.fromkeys((layer, expert) for token in tokens for expert in token))
        for key in wanted:
            age = clocks[layer] - used_at.get(key, 0)
            counts[key] = counts.get(key, 0) / 2 ** (age / 128) + 1
            classes[key] = min(7, floor(log2(counts[key])))
            used_at[key] = clocks[layer]
            used_in[key] = number
        missing = [key for key in wanted if key not in held]
        hits += len(wanted) - len(missing)
        for key in missing:
            if len(held) == num_slots:
                others = held.difference(wanted)
                held.remove(
                    max(others, key=lambda one: leaves(one, clocks, used_at, classes, used_in))
                )
            held.add(key)
    return hits


def leaves(key, clocks, used_at, classes, used_in) -> tuple:
    """The largest of these leaves first."""
    age = clocks[key[0]] - used_at[key]
    lower = tuple(-part for part in key)
    return (age / 2 ** classes[key], -classes[key], -used_in[key], lower)


@pytest.mark.parametrize("num_slots", [48, 96, 192])
def test_it_hits_as_often_as_a_replay_by_its_rule(num_slots: int) -> None:
    recorded = read_parquet(TRACE, num_experts=SHAPE.num_experts)
    trace = recorded.take(recorded.request < 2)
    case = Case(SHAPE, trace, num_slots, Scope.GLOBAL, 2 * SHAPE.expert_nbytes)
    assert run(case, eviction="class_lru").counters.totals()["hits"] == replayed(trace, num_slots)


def test_a_parameter_without_sense_is_refused() -> None:
    for text in ("class_lru:half_life=0", "class_lru:num_classes=0"):
        with pytest.raises(BadUsage, match="class_lru needs"):
            parse("eviction", text)
