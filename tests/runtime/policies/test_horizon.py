"""What must hold of horizon, and that no online policy has more hits than it on the checked-in trace."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from artifacts.shape import Shape
from artifacts.trace import DECODE, PREFILL, Trace
from artifacts.tracefile import read_parquet
from runtime.cache import Scope
from runtime.policies.base import Artefacts, Now, Step
from runtime.policies.eviction import horizon
from runtime.policies.eviction.horizon import _MEMORY, Horizon
from tests.runtime.contract import Case, run
from tests.runtime.policies.horizon_reference import Reference

DEMO = Shape(num_layers=8, num_experts=32, top_k=4, expert_nbytes=160)
RIVALS = ("lru", "lfu", "lcp", "least_stale", "fld", "score")


def ranked(shape: Shape, passes: list[list[list[list[int]]]], predicted: np.ndarray | None = None) -> np.ndarray:
    """[num_keys] the sort key after these passes, each a list of layers of [T, K] experts; `predicted` [D, E] comes
    with every step."""
    policy, now = Horizon(), Now()
    policy.prepare(shape, Artefacts())
    for layers in passes:
        now.pass_index += 1
        for layer, selected in enumerate(layers):
            ids = np.array(selected)
            now.step, now.layer = now.step + 1, layer
            phase = DECODE if len(ids) == 1 else PREFILL
            ahead = None if predicted is None else np.tile(predicted, (len(ids), 1, 1))
            step = Step(now.pass_index, phase, layer, ids, np.ones(ids.shape, np.float32), predicted=ahead)
            policy.used((np.unique(ids) + layer * shape.num_experts).tolist(), step, now)
    return policy.order(np.arange(shape.num_keys), now)[0]


def test_what_every_pass_uses_outlasts_what_none_does() -> None:
    shape = Shape(num_layers=2, num_experts=6, top_k=2, expert_nbytes=1)
    order = ranked(shape, [[[[0, 1 + turn % 2]], [[5, 4]]] for turn in range(30)])
    assert order[0] > order[1] and order[0] > order[2] > order[3]
    assert order[6 + 4] > order[6 + 3]
    assert order[3] == order[4] == order[5], "what is known alike ties, and the lower key goes"


def test_what_followed_a_token_before_is_expected_after_it() -> None:
    """Experts go round in a circle of six: frequencies are all alike, only what came after this one can tell."""
    shape = Shape(num_layers=1, num_experts=6, top_k=1, expert_nbytes=1)
    order = ranked(shape, [[[[turn % 6]]] for turn in range(6 * 20)])  # the last is 5
    assert order.argmax() == 0


def test_a_prompt_is_remembered_token_by_token() -> None:
    shape = Shape(num_layers=1, num_experts=6, top_k=1, expert_nbytes=1)
    circle = [[turn % 6] for turn in range(60)]
    order = ranked(shape, [[circle], [[[0]]], [[[1]]]])
    assert order.argmax() == 2


def test_a_prediction_moves_the_next_visit() -> None:
    shape = Shape(num_layers=2, num_experts=6, top_k=1, expert_nbytes=1)
    passes = [[[[turn % 3]], [[turn % 3]]] for turn in range(20)] + [[[[0]]]]
    sure = np.eye(6)[[5]]
    plain, told = ranked(shape, passes), ranked(shape, passes, sure)
    assert told[6 + 5] > plain[6 + 5]
    assert (told[:6] == plain[:6]).all(), "layer 0 was predicted too, but has been since"


def test_prompts_longer_than_the_memory_and_layers_of_many_experts() -> None:
    rng = np.random.default_rng(0)
    shape = Shape(num_layers=2, num_experts=130, top_k=3, expert_nbytes=1)

    def layers(num_tokens: int) -> list[list[list[int]]]:
        return [[rng.permutation(130)[:3].tolist() for _ in range(num_tokens)] for _ in range(2)]

    lengths = [_MEMORY + 9, 1, 1, 7, *[1] * 20, 300, 1]
    passes = [layers(length) for length in lengths]
    order = ranked(shape, passes)
    assert np.isfinite(order).all()
    assert np.array_equal(order, ranked(shape, passes))


@pytest.mark.parametrize("seed", range(4))
def test_compiled_and_plain_agree(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, single tokens, batches and dropped ranks, past a memory of 32 tokens; layers of more than 64 experts;
    with predictions for two layers ahead every other time."""
    monkeypatch.setattr(horizon, "_MEMORY", 32)
    rng = np.random.default_rng(seed)
    shape = Shape(num_layers=3, num_experts=(8, 70)[seed % 2], top_k=3, expert_nbytes=1)
    policy, plain, now = Horizon(), Reference(shape, 32), Now()
    policy.prepare(shape, Artefacts())
    for _ in range(60):
        phase, num_tokens = [(PREFILL, 1), (PREFILL, 9), (DECODE, 1), (DECODE, 1), (DECODE, 3)][rng.integers(5)]
        now.pass_index, now.num_tokens = now.pass_index + 1, now.num_tokens + num_tokens
        for layer in range(shape.num_layers):
            ids = rng.geometric(0.2, (num_tokens, 9)) % shape.num_experts
            ids = np.array([list(dict.fromkeys([*row, 0, 1, 2]))[:3] for row in ids.tolist()])
            ids[rng.random(ids.shape) < 0.1] = -1
            now.step, now.layer = now.step + 1, layer
            said = {}
            if seed // 2:
                said["predicted"] = rng.dirichlet(np.full(shape.num_experts, 0.2), (num_tokens, 2)).astype(np.float32)
                said["last"] = np.arange(num_tokens) if phase == DECODE else np.array([num_tokens - 1])
            step = Step(now.pass_index, phase, layer, ids, np.ones(ids.shape, np.float32), **said)
            keys = [layer * shape.num_experts + expert for expert in dict.fromkeys(ids.ravel().tolist()) if expert >= 0]
            policy.used(keys, step, now)
            plain.used(keys, step, now)
            found = -policy.order(np.arange(shape.num_keys), now)[0].reshape(plain.expected.shape)
            # What is expected is rounded to a step: half of one, and what float32 leaves of some thousand.
            assert np.allclose(found, plain.expected, rtol=1e-4, atol=0.51), now


@cache
def demo_trace() -> Trace:
    path = Path(__file__).parents[2] / "data" / "demo-trace.parquet"
    return read_parquet(path, num_experts=DEMO.num_experts)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("slots", [16, 32, 64, 128])
def test_no_online_policy_has_more_hits_on_the_demo_trace(scope: Scope, slots: int) -> None:
    case = Case(DEMO, demo_trace(), slots, scope, 0)
    hits = {name: run(case, eviction=name).counters.totals()["hits"] for name in ("horizon", *RIVALS)}
    if scope is Scope.LAYER and slots <= DEMO.top_k * DEMO.num_layers:
        # A token leaves nothing to choose: only the prompts' last waves differ.
        assert hits["horizon"] >= 0.99 * max(hits.values()), hits
    else:
        assert hits["horizon"] == max(hits.values()), hits
