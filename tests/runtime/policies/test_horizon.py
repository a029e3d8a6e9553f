"""What must hold of horizon, and that no online policy has more hits than it on the checked-in
trace."""

from collections.abc import Iterable
from functools import cache

import numpy as np
import pytest

from artifacts.shape import Shape
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import DECODE, PREFILL, Trace
from runtime.policies.base import Artefacts, Now, Step
from runtime.policies.eviction import horizon
from runtime.policies.eviction.horizon import _MEMORY, Horizon
from runtime.policies.presets import Scope
from tests import TRACE
from tests.runtime.policies.contract import Case, run
from tests.runtime.policies.horizon_reference import Reference

pytestmark = pytest.mark.slow

DEMO = Shape(num_layers=8, num_experts=32, top_k=4, expert_nbytes=160)
KINDS = (
    (PREFILL, 1),
    (PREFILL, 2),
    (PREFILL, 9),
    (DECODE, 1),
    (DECODE, 1),
    (DECODE, 3),
)  # of passes, and tokens
RIVALS = ("lru", "lfu", "lcp", "least_stale", "fld", "score")


Passes = list[list[list[list[int]]]]


def ranked(shape: Shape, passes: Passes, predicted: np.ndarray | None = None) -> np.ndarray:
    """Return the sort keys [num_keys] after these passes, each a list of layers of [T, K] experts;
    every step carries `predicted` [D, E]."""
    policy, now = after(shape, passes, predicted)
    return policy.order(np.arange(shape.num_keys), now)[0]


def after(shape: Shape, passes: Passes, predicted: np.ndarray | None = None) -> tuple[Horizon, Now]:
    policy = Horizon()
    now = Now()
    policy.prepare(shape, Artefacts())
    for layers in passes:
        now.pass_index += 1
        for layer, selected in enumerate(layers):
            ids = np.array(selected)
            now.step = now.step + 1
            now.layer = layer
            phase = DECODE if len(ids) == 1 else PREFILL
            ahead = None if predicted is None else np.tile(predicted, (len(ids), 1, 1))
            step = Step(
                now.pass_index, phase, layer, ids, np.ones(ids.shape, np.float32), predicted=ahead
            )
            policy.used((np.unique(ids) + layer * shape.num_experts).tolist(), step, now)
    return policy, now


def levels(shape: Shape, tokens: Iterable[int]) -> np.ndarray:
    """Return what is known [F, E] of layer 0 after tokens that use one expert each, unrooted."""
    policy, _ = after(shape, [[[[expert]]] for expert in tokens])
    return (policy._known[0] / policy._known[0, 0, 0]) ** 2


def test_what_every_pass_uses_outlasts_what_none_does() -> None:
    shape = Shape(num_layers=2, num_experts=6, top_k=2, expert_nbytes=1)
    order = ranked(shape, [[[[0, 1 + turn % 2]], [[5, 4]]] for turn in range(30)])
    assert order[0] > order[1] and order[0] > order[2] > order[3]
    assert order[6 + 4] > order[6 + 3]
    assert order[3] == order[4] == order[5], "what is known alike ties, and the lower key goes"


def test_what_followed_a_token_before_is_expected_after_it() -> None:
    """Experts repeat in a circle of six: all frequencies are alike, and only what followed this
    expert before can tell."""
    shape = Shape(num_layers=1, num_experts=6, top_k=1, expert_nbytes=1)
    order = ranked(shape, [[[[turn % 6]]] for turn in range(6 * 20)])  # the last is 5
    assert order.argmax() == 0


def test_tokens_count_by_what_they_have_in_common_with_the_newest() -> None:
    """If no token has anything in common with the newest, all count alike, the first too. Else a
    token that agrees everywhere outweighs the others, and what followed it counts .45 as much with
    every token between."""
    shape = Shape(num_layers=1, num_experts=8, top_k=1, expert_nbytes=1)
    *_, broad, sharp = levels(shape, range(8))
    assert broad == pytest.approx(np.full(8, 1 / 8)) and sharp == pytest.approx(broad)
    *_, mean, broad, sharp = levels(shape, (0, 1, 2, 3, 4, 0))
    counts = np.array([0, 1024, 461, 207, 93, 0, 0, 0]) / 1024  # powers of .45
    assert broad == pytest.approx((counts + 0.5 * mean) / (counts.sum() + 0.5), abs=1e-5)
    assert sharp == pytest.approx(broad, abs=1e-5)


def test_nothing_is_expected_later_than_a_wait_without_end_counts() -> None:
    shape = Shape(num_layers=2, num_experts=4, top_k=1, expert_nbytes=1)
    policy, now = after(shape, [[[[0]], [[1]]]] * 400)
    order = policy.order(np.arange(shape.num_keys), now)[0]
    assert -order[3] == pytest.approx(now.step - 1 + 2 / (1 - 0.85), abs=1), (
        "of layer 0, never used"
    )
    assert order.min() >= -now.step - 2 / (1 - 0.85) - 1 / 16


def test_a_prompt_is_remembered_token_by_token() -> None:
    shape = Shape(num_layers=1, num_experts=6, top_k=1, expert_nbytes=1)
    circle = [[turn % 6] for turn in range(60)]
    order = ranked(shape, [[circle], [[[0]]], [[[1]]]])
    assert order.argmax() == 2


def test_a_prediction_moves_the_next_visit() -> None:
    shape = Shape(num_layers=2, num_experts=6, top_k=1, expert_nbytes=1)
    passes = [[[[turn % 3]], [[turn % 3]]] for turn in range(6)] + [[[[0]]]]
    sure = np.eye(6)[[5]]
    plain = ranked(shape, passes)
    told = ranked(shape, passes, sure)
    assert told[6 + 5] > plain[6 + 5]
    assert (told[:6] == plain[:6]).all(), "layer 0 was predicted too, but has been since"


def test_one_token_may_say_what_several_layers_ahead_use() -> None:
    shape = Shape(num_layers=3, num_experts=6, top_k=1, expert_nbytes=1)
    passes = [[[[turn % 3]]] * 3 for turn in range(6)]
    plain = ranked(shape, passes)
    told = ranked(shape, passes, np.eye(6)[[5, 4]])
    assert told[5] > plain[5] and told[6 + 4] > plain[6 + 4]


def looked_ahead(
    predicted: np.ndarray, weights: list[float], is_pending: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearness of the layers' experts [L, E] and the least squares after layer 0 ran in
    step 7, and its router gave `predicted` [T, D, E] for the layer after it."""
    from runtime.policies.shared import horizon_kernels

    nearness = np.zeros((2, 4))
    moments = np.zeros((1, 3, 3))
    last = np.arange(len(predicted))
    used = np.zeros((2, 4), np.int64)
    waits = np.full((2, 4), 4 * horizon_kernels.ONE)
    known = np.ones((1, 2, 3, 4))
    fitted = known, np.array([weights]), moments, np.zeros((1, 3))
    horizon_kernels.look_ahead(0, 7, 1, predicted, last, used, waits, nearness, is_pending, *fitted)
    return nearness, moments


def test_a_visit_stays_the_earliest_and_the_wait_the_latest_whatever_was_fitted() -> None:
    for weight, chance in ((3.0, 1), (0.5, 0.5), (-3.0, 0)):
        nearness, _ = looked_ahead(np.eye(4)[None, :1], [weight, 0, 0], np.zeros((1, 2)))
        assert nearness[1, 0] == -(7 + 1) - (1 - chance) * 2 * 4


def test_what_was_said_of_a_visit_is_compared_with_it_once() -> None:
    is_pending = np.array([[1.0, 0.0]])
    for is_first in (True, False):
        _, moments = looked_ahead(np.zeros((0, 0, 4)), [0.0, 0.0, 0.0], is_pending)
        assert moments.any() == is_first


def test_a_wait_below_a_pass_weighs_as_a_pass_does() -> None:
    from runtime.policies.shared import horizon_kernels

    heard = []
    for weight in (1.0, -0.5):
        moments = np.zeros((1, 1), np.int64)
        products = np.zeros(1, np.int64)
        known = np.full((1, 1, 3), horizon_kernels.ONE)
        weights = np.array([int(weight * horizon_kernels.ONE)])
        used = np.array([[1, 0, 0]])
        horizon_kernels.learn(weights, known, 0 * known, used, moments, products)
        heard.append((moments.item(), products.item()))
    assert heard[0] == heard[1] == (3 * horizon_kernels.ONE, 3 * horizon_kernels.ONE)


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
    """Prompts, single tokens, batches and dropped ranks, past a memory of 32 tokens; layers of more
    than 64 experts; with predictions for two layers ahead every other time."""
    monkeypatch.setattr(horizon, "_MEMORY", 32)
    rng = np.random.default_rng(seed)
    shape = Shape(num_layers=3, num_experts=(8, 70)[seed % 2], top_k=3, expert_nbytes=1)
    policy = Horizon()
    plain = Reference(shape, 32)
    now = Now()
    policy.prepare(shape, Artefacts())
    for _ in range(60):
        phase, num_tokens = KINDS[rng.integers(len(KINDS))]
        now.pass_index = now.pass_index + 1
        now.num_tokens = now.num_tokens + num_tokens
        for layer in range(shape.num_layers):
            ids = rng.geometric(0.2, (num_tokens, 9)) % shape.num_experts
            ids = np.array([list(dict.fromkeys([*row, 0, 1, 2]))[:3] for row in ids.tolist()])
            ids[rng.random(ids.shape) < 0.1] = -1
            now.step = now.step + 1
            now.layer = layer
            said = {}
            if seed // 2:
                said["predicted"] = rng.dirichlet(
                    np.full(shape.num_experts, 0.2), (num_tokens, 2)
                ).astype(np.float32)
                said["last"] = (
                    np.arange(num_tokens) if phase == DECODE else np.array([num_tokens - 1])
                )
            step = Step(now.pass_index, phase, layer, ids, np.ones(ids.shape, np.float32), **said)
            keys = [
                layer * shape.num_experts + expert
                for expert in dict.fromkeys(ids.ravel().tolist())
                if expert >= 0
            ]
            policy.used(keys, step, now)
            plain.used(keys, step, now)
            found = -policy.order(np.arange(shape.num_keys), now)[0].reshape(plain.expected.shape)
            # Expected steps are rounded to sixteenths; float32 leaves errors of some thousandths of
            # a step.
            assert np.allclose(found, plain.expected, rtol=1e-4, atol=0.04), now


@cache
def demo_trace() -> Trace:
    return read_parquet(TRACE, num_experts=DEMO.num_experts)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("slots", [16, 32, 64, 128])
def test_no_online_policy_has_more_hits_on_the_demo_trace(scope: Scope, slots: int) -> None:
    case = Case(DEMO, demo_trace(), slots, scope, 0)
    hits = {
        name: run(case, eviction=name).counters.totals()["hits"] for name in ("horizon", *RIVALS)
    }
    if scope is Scope.LAYER and slots <= DEMO.top_k * DEMO.num_layers:
        # A single token leaves nothing to choose: only the prompts' last waves differ.
        assert hits["horizon"] >= 0.99 * max(hits.values()), hits
    else:
        assert hits["horizon"] == max(hits.values()), hits
