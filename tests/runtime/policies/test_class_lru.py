"""Class LRU, LRU and Belady beside replays that are written from their rules alone: dictionaries,
and a search through all that is held for each victim."""

from dataclasses import dataclass, field, replace
from math import floor, log2
from pathlib import Path

import numpy as np
import pytest

import moectl
from artifacts.errors import BadUsage
from artifacts.shape import Shape
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import Trace
from runtime.policies import parse
from runtime.policies.presets import Scope
from tests import TRACE
from tests.runtime.policies.contract import Case, run
from tools.make.golden import SHAPE

SHIPPED = Path(moectl.__file__).parent / "traces" / "gpt-oss-20b.parquet"
SHIPPED_SHAPE = Shape(num_layers=24, num_experts=32, top_k=4, expert_nbytes=160)
Key = tuple[int, int]  # layer and expert


@dataclass
class Lru:
    """The oldest use leaves, of equals the lower key."""

    used_in: dict[Key, int] = field(default_factory=dict)

    def use(self, number: int, num_tokens: int, wanted: list[Key]) -> None:
        self.used_in.update(dict.fromkeys(wanted, number))

    def leaves(self, key: Key) -> tuple:
        """The largest of these leaves first."""
        return (-self.used_in[key], lower(key))


@dataclass
class Belady:
    """What is wanted again last leaves."""

    uses: dict[Key, list[int]]  # the steps that want each key, the next one last

    def use(self, number: int, num_tokens: int, wanted: list[Key]) -> None:
        for key in wanted:
            self.uses[key].pop()

    def leaves(self, key: Key) -> tuple:
        uses = self.uses[key]
        return (uses[-1] if uses else 1 << 60, lower(key))


@dataclass
class ClassLru(Lru):
    """The largest age / 2^class leaves: ages in tokens of the layer, classes by uses that halve every
    128 tokens."""

    clocks: dict[int, int] = field(default_factory=dict)
    counts: dict[Key, float] = field(default_factory=dict)
    used_at: dict[Key, int] = field(default_factory=dict)
    classes: dict[Key, int] = field(default_factory=dict)

    def use(self, number: int, num_tokens: int, wanted: list[Key]) -> None:
        layer = wanted[0][0]
        clock = self.clocks[layer] = self.clocks.get(layer, 0) + num_tokens
        for key in wanted:
            age = clock - self.used_at.get(key, 0)
            self.counts[key] = self.counts.get(key, 0) / 2 ** (age / 128) + 1
            self.classes[key] = min(7, floor(log2(self.counts[key])))
            self.used_at[key] = clock
        super().use(number, num_tokens, wanted)

    def leaves(self, key: Key) -> tuple:
        age = self.clocks[key[0]] - self.used_at[key]
        return (age / 2 ** self.classes[key], -self.classes[key], *super().leaves(key))


def lower(key: Key) -> tuple:
    return tuple(-part for part in key)


def replayed(trace: Trace, num_slots: int, name: str) -> int:
    """Return the hits of one pool over all layers."""
    steps = [(step.layer, step.experts.tolist()) for step in trace.steps()]
    wanted = [
        list(dict.fromkeys((layer, expert) for token in tokens for expert in token))
        for layer, tokens in steps
    ]
    uses: dict[Key, list[int]] = {}
    for number in reversed(range(len(steps))):
        for key in wanted[number]:
            uses.setdefault(key, []).append(number)
    rule = {"lru": Lru, "class_lru": ClassLru, "belady": lambda: Belady(uses)}[name]()
    held = set()
    hits = 0
    for number, keys in enumerate(wanted):
        rule.use(number, len(steps[number][1]), keys)
        missing = [key for key in keys if key not in held]
        hits += len(keys) - len(missing)
        for key in missing:
            if len(held) == num_slots:
                held.remove(max(held.difference(keys), key=rule.leaves))
            held.add(key)
    return hits


def difference(trace: Trace, shape: Shape, num_slots: int, name: str) -> int:
    """Return how many hits the policy has more than the replay."""
    trace = replace(trace, embeddings=np.zeros((1, 1), np.float32))  # which the maps of `run` need
    case = Case(shape, trace, num_slots, Scope.GLOBAL, 2 * shape.expert_nbytes)
    return run(case, eviction=name).counters.totals()["hits"] - replayed(trace, num_slots, name)


@pytest.mark.parametrize("name", ["lru", "class_lru", "belady"])
@pytest.mark.parametrize("num_slots", [48, 192])
def test_it_hits_as_often_as_a_replay_by_its_rule(num_slots: int, name: str) -> None:
    recorded = read_parquet(TRACE, num_experts=SHAPE.num_experts)
    assert not difference(recorded.take(recorded.request < 2), SHAPE, num_slots, name)


@pytest.mark.parametrize("name", ["lru", "class_lru", "belady"])
@pytest.mark.parametrize(
    ("num_slots", "passes"),
    [(192, 60), *(pytest.param(n, 9999, marks=pytest.mark.slow) for n in (96, 192, 384))],
)
def test_it_does_on_the_trace_that_is_shipped(num_slots: int, passes: int, name: str) -> None:
    recorded = read_parquet(SHIPPED, num_experts=32)
    assert not difference(recorded.take(recorded.pass_ < passes), SHIPPED_SHAPE, num_slots, name)


def test_a_parameter_without_sense_is_refused() -> None:
    for text in ("class_lru:half_life=0", "class_lru:num_classes=0"):
        with pytest.raises(BadUsage, match="class_lru needs"):
            parse("eviction", text)
