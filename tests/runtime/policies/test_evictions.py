"""Eviction orders by hand: every eviction policy of a few lines."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from artifacts.errors import BadUsage
from artifacts.traces.next_use import NEVER, NextUse
from runtime.policies import POLICIES, parse
from runtime.policies.base import Eviction, Now
from runtime.policies.eviction.shared import rank_then_last_use
from tests.runtime.policies.examples import prepared, step


def order(policy: Eviction, now: Now) -> list[int]:
    """Return layer 0 in the order of eviction."""
    return np.lexsort(policy.order(np.arange(6), now)[::-1]).tolist()


def test_lhu_counts_uses_at_full_precision_only() -> None:
    policy = prepared("eviction", "lhu")
    wanted = step([[0, 1]])
    policy.fetched({0: 16, 1: 4}, Now(step=0))
    policy.used([0, 1], wanted, Now(step=0))
    policy.used([1], wanted, Now(step=1))  # still the low replica
    policy.used([2], wanted, Now(step=2))
    assert order(policy, Now(step=3)) == [3, 4, 5, 1, 0, 2]
    policy.fetched({1: 16}, Now(step=3))
    policy.used([1], wanted, Now(step=3))
    assert order(policy, Now(step=4)) == [3, 4, 5, 0, 2, 1]
    policy.fetched({2: 2}, Now(step=4))
    policy.prefetched([2], Now(step=4))  # prefetches are at full precision
    policy.used([2], wanted, Now(step=5))
    policy.used([3], wanted, Now(step=6))
    assert order(policy, Now(step=6)) == [4, 5, 0, 1, 3, 2]


def test_belady_evicts_what_is_wanted_last() -> None:
    first = np.array([0, 3, 1, NEVER, 2, NEVER, *[NEVER] * 12])
    future = NextUse(first, (np.array([0]), np.array([2])), (np.array([NEVER]), np.array([2])))
    policy = prepared("eviction", "belady", next_use=future)
    assert order(policy, Now(step=-1)) == [3, 5, 1, 4, 2, 0]
    policy.used([0], step([[0, 0]]), Now(step=0))
    assert order(policy, Now(step=0)) == [0, 3, 5, 1, 4, 2]
    policy.used([], step([[2, 2]]), Now(step=1))  # 2 was wanted, whatever served it
    assert order(policy, Now(step=1)) == [0, 3, 5, 1, 2, 4]


def leaving(policy: Eviction, keys: list[int], now: Now) -> list[int]:
    """Return these keys in the order of eviction."""
    return np.array(keys)[np.lexsort(policy.order(np.array(keys), now)[::-1])].tolist()


@pytest.mark.parametrize(
    "name", ["lru", "class_lru", "lfu", "lcp", "fld", "least_stale", "lhu", "activation"]
)
def test_what_was_never_used_leaves_before_what_was_used_first_of_all(name: str) -> None:
    """A prefetched key need not have been used. Key 0 is used in the first step, so that the lower
    key does not decide."""
    policy = prepared("eviction", name)
    policy.used([0], step([[0, 0]]), Now(0, 0, 0, 1))
    assert leaving(policy, [0, 1], Now(1, 1, 0, 2)) == [1, 0]


@pytest.mark.parametrize("name", ["class_lru", "fld", "lhu", "least_stale"])
def test_of_equals_the_older_use_leaves_first(name: str) -> None:
    policy = prepared("eviction", name)
    for turn, expert in enumerate([4, 1, 3, 0, 2]):
        policy.used([expert], step([[expert, expert]]), Now(turn, 0, 0, 1))
    assert leaving(policy, [0, 1, 2, 3, 4], Now(5, 1, 0, 2)) == [4, 1, 3, 0, 2]


def test_fld_evicts_the_layer_that_comes_again_last() -> None:
    policy = prepared("eviction", "fld")
    by_layer = [1, 7, 13]  # one key of each of the three layers
    assert [leaving(policy, by_layer, Now(0, 0, layer)) for layer in range(3)] == [
        [13, 7, 1],
        [1, 13, 7],
        [7, 1, 13],
    ]
    policy.used([2, 13], step([[2, 2]]), Now(9))
    assert leaving(policy, [1, 2, 12, 13], Now(10, 0, 1)) == [1, 2, 12, 13]
    absolute = prepared("eviction", "fld:distance=absolute")
    assert [leaving(absolute, by_layer, Now(0, 0, layer)) for layer in range(3)] == [
        [13, 7, 1],
        [1, 13, 7],
        [1, 7, 13],
    ]


def test_lru_takes_a_prefetch_for_a_use_if_told() -> None:
    for text, expected in (("lru", [1, 0, 2]), ("lru:stamp=load", [0, 1, 2])):
        policy = prepared("eviction", text)
        policy.used([0], step([[0, 0]]), Now(step=0))
        policy.prefetched([1], Now(step=1))
        policy.used([2], step([[2, 2]]), Now(step=2))
        assert leaving(policy, [0, 1, 2], Now(step=2)) == expected


def test_lfu_counts_each_use_and_halves_what_was_counted() -> None:
    # Decayed, in pass 3: ((1 / 2 + 1) / 2 + 1) / 2; 1 / 2; 1 / 8 + 1.
    for text, counts in (("lfu", [3, 1, 2]), ("lfu:decay=0.5", [0.875, 0.5, 1.125])):
        policy = prepared("eviction", text)
        for pass_index, keys in enumerate([[0, 2], [0], [1, 0], [2]]):
            policy.used(keys, step([[0, 1]]), Now(pass_index, pass_index))
        assert policy.order(np.arange(3), Now(4, 3))[0].tolist() == counts


def test_lcp_is_its_formula() -> None:
    policy = prepared("eviction", "lcp:rho=0.25,omega=8")
    policy.used([0, 1], step([[0, 1]]), Now(0, 0, 0, 4))
    policy.used([1], step([[1, 1]]), Now(1, 1, 0, 12))
    # mu * rho ** (nu / omega): one use 12 tokens ago; two uses, the last 4 tokens ago; none.
    assert policy.order(np.arange(3), Now(2, 2, 0, 16))[0] == pytest.approx(
        [0.25**1.5, 2 * 0.25**0.5, 0]
    )


def test_lcp_counts_a_prompt_once_or_token_by_token() -> None:
    """Of a prompt of three tokens two use expert 0, the last of them the second; one uses 1, first
    of all; 2 stands in for an expert that none selected."""
    prompt = step([[0, 1], [0, 4], [3, 4]])
    for uses, worth in (
        ("passes", [1, 1, 1]),
        ("tokens", [2 * 0.25 ** (1 / 8), 0.25 ** (2 / 8), 1]),
    ):
        policy = prepared("eviction", f"lcp:omega=8,uses={uses}")
        policy.order(np.arange(3), Now(0, 0, 0, 3))
        policy.used([0, 1, 2], prompt, Now(0, 0, 0, 3))
        assert policy.order(np.arange(3), Now(0, 0, 0, 3))[0] == pytest.approx(worth)
        policy.used([1], step([[1, 5]]), Now(1, 1, 0, 4))
        later = [worth[0] * 0.25 ** (1 / 8), 2, worth[2] * 0.25 ** (1 / 8)]
        assert policy.order(np.arange(3), Now(1, 1, 0, 4))[0] == pytest.approx(later)


@pytest.mark.parametrize(
    ("within", "expected"),
    [
        # This pass has used 8 and prefetched 14, and 1 for the next; the others are stale, 7 and 12
        # of two passes.
        ("ascending", [3, 2, 7, 6, 13, 12, 8, 14, 1]),
        ("left", [3, 2, 7, 6, 8, 13, 12, 1, 14]),
        ("ahead", [3, 2, 7, 6, 13, 12, 8, 1, 14]),
    ],
)
def test_least_stale_spares_what_this_pass_touched(within: str, expected: list[int]) -> None:
    policy = prepared("eviction", f"least_stale:within={within}")
    for turn, (pass_index, keys) in enumerate([(0, [2, 14]), (0, [6, 7]), (1, [6]), (1, [12, 1])]):
        policy.used(keys, step([[0, 1]]), Now(turn, pass_index))
    policy.prefetched([14, 1], Now(4, 2))
    policy.used([8], step([[2, 2]], layer=1), Now(4, 2, 1))
    assert leaving(policy, [1, 2, 3, 6, 7, 8, 12, 13, 14], Now(4, 2, 1)) == expected


def test_what_is_prefetched_past_the_last_layer_is_current_in_the_next_pass() -> None:
    policy = prepared("eviction", "least_stale")
    policy.used([13], step([[1, 1]], layer=2), Now(0, 0, 2))
    policy.prefetched([1], Now(0, 0, 2))
    assert leaving(policy, [1, 7, 13], Now(0, 0, 2)) == [7, 13, 1]
    policy.used([2], step([[2, 2]]), Now(1, 1, 0))
    assert leaving(policy, [1, 2, 7, 13], Now(1, 1, 0)) == [13, 7, 1, 2]
    policy.prefetched([2], Now(1, 1, 0))
    assert leaving(policy, [1, 2, 7, 13], Now(2, 2, 0)) == [1, 13, 7, 2], (
        "only the next pass, not the one after"
    )
    policy.prefetched([3], Now(2, 2, 1))
    assert leaving(policy, [3, 4, 7], Now(3, 4, 0)) == [3, 4, 7], "and only if it is the very next"


def test_a_resident_that_is_proposed_again_is_current() -> None:
    policy = prepared("eviction", "least_stale")
    policy.used([1, 7, 13], step([[1, 1]]), Now(0, 0, 2))
    policy.proposed([7], Now(1, 1, 0))
    assert leaving(policy, [1, 7, 13], Now(1, 1, 0)) == [1, 13, 7]


def test_in_the_first_pass_what_is_not_touched_is_stale() -> None:
    policy = prepared("eviction", "least_stale")
    policy.used([0], step([[0, 0]]), Now(0, 0))
    assert leaving(policy, [0, 7], Now(0, 0)) == [7, 0]


def test_least_stale_evicts_what_is_behind_and_then_the_farthest() -> None:
    by_layer = [1, 7, 13]
    for text, expected in (
        ("least_stale", [[1, 13, 7], [1, 7, 13], [1, 7, 13]]),
        ("least_stale:within=ascending", [by_layer] * 3),
    ):
        policy = prepared("eviction", text)
        for layer in range(3):
            policy.used([by_layer[2 - layer]], step([[1, 1]]), Now(layer, 0))
        assert [leaving(policy, by_layer, Now(3, 1, layer)) for layer in range(3)] == expected


@pytest.mark.parametrize(
    ("within", "expected"),
    [
        ("ahead", [6, 13, 1, 7, 14, 8]),
        ("left", [6, 1, 7, 13, 14, 8]),
        ("ascending", [6, 13, 1, 7, 8, 14]),
    ],
)
def test_what_the_step_still_wants_is_not_behind(within: str, expected: list[int]) -> None:
    """Served one by one: of layer 1 the step wants 7 and 8, and has served 7. 1 and 14 are current
    too, 6 and 13 stale."""
    policy = prepared("eviction", f"least_stale:within={within}")
    policy.used([1], step([[1, 1]]), Now(0, 0, 0))
    now = Now(1, 0, 1, unserved={8})
    policy.used([7, 8], step([[1, 2]], layer=1), now)
    policy.proposed([14], now)
    assert leaving(policy, [1, 6, 7, 8, 13, 14], now) == expected


def test_before_a_pass_nothing_of_its_first_layer_is_behind() -> None:
    """What is proposed there is for this pass, not for the next; what is not leaves after the
    layers farther ahead."""
    policy = prepared("eviction", "least_stale")
    opening = Now(-1, 0, 0, unserved=set(range(6)))
    policy.proposed([1], opening)
    assert leaving(policy, [0, 1, 7, 13], opening) == [13, 7, 0, 1]
    assert leaving(policy, [0, 1, 7, 13], Now(0, 0, 0)) == [0, 13, 7, 1]
    assert leaving(policy, [0, 1, 7, 13], Now(3, 1, 0)) == [0, 1, 13, 7], (
        "in the next pass it is stale"
    )


def test_score_sums_what_the_router_says_of_a_layer() -> None:
    first = [[0.5, 0.25, 0.25, 0, 0, 0], [0.25, 0, 0.75, 0, 0, 0]]
    second = [[0.125, 0.875, 0, 0, 0, 0]]
    for text, sums in (
        ("score", [0.875, 1.125, 1.0]),
        ("score:decay=0.5", [0.5, 1.0, 0.5]),
        ("score:of=selected", [0.875, 0.875, 1.0]),
    ):
        policy = prepared("eviction", text)
        policy.used([6], step([[0, 2], [2, 0]], first, layer=1), Now())
        policy.used([6], step([[1, 0]], second, layer=1), Now())
        assert policy.order(np.array([6, 7, 8, 0, 12]), Now())[0].tolist() == [*sums, 0, 0]


def test_a_policy_that_needs_more_than_uses_says_so() -> None:
    sees = {name: parse("eviction", name) for name in POLICIES["eviction"]}
    assert {name for name, policy in sees.items() if policy.sees_probabilities} == {"score", "map"}
    assert {name for name, policy in sees.items() if policy.sees_embeddings} == {"map"}


def test_random_is_seeded() -> None:
    first, again, other = (
        [prepared("eviction", text).order(np.arange(5), Now())[0].tolist()]
        for text in ("random:seed=3", "random:seed=3", "random:seed=4")
    )
    assert first == again != other


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[Now, list[int], list[int], list[int]]]:
    """Draw steps of passes over three layers, not all of which run, with the keys that each uses,
    proposes and prefetches."""
    steps = []
    num_tokens = 0
    for pass_index in range(draw(st.integers(1, 5))):
        num_tokens += draw(st.integers(1, 5))
        for layer in sorted(draw(st.sets(st.integers(0, 2), min_size=1))):
            used = draw(
                st.lists(st.integers(6 * layer, 6 * layer + 5), min_size=1, max_size=4, unique=True)
            )
            proposed, prefetched = (
                draw(st.lists(st.integers(0, 17), max_size=3, unique=True)) for _ in range(2)
            )
            steps.append(
                (Now(len(steps), pass_index, layer, num_tokens), used, proposed, prefetched)
            )
    return steps


@given(
    histories(),
    st.sampled_from(
        [*(f"least_stale:within={order}" for order in ("ascending", "left", "ahead"))]
        + ["lcp:rho=0.25,omega=2", "lru", "lru:stamp=load"]
    ),
)
@settings(max_examples=100)
def test_ranks_kept_from_step_to_step_are_those_of_the_whole_history(
    history: list, text: str
) -> None:
    policy = prepared("eviction", text)
    keys = np.arange(18)
    uses = np.zeros(18, np.int64)
    last_token = np.zeros(18, np.int64)
    last_use = np.full(18, -1)
    last_pass = np.full(18, -1)
    layers = keys // 6
    queues = policy.queues()
    assert (queues is not None) == (text == "lru")
    for now, used, proposed, prefetched in history:
        policy.used(used, step([[0, 1]], layer=now.layer), now)
        uses[used] += 1
        last_use[used] = now.step
        last_pass[used] = now.pass_index
        last_token[used] = now.num_tokens
        for _ in range(2):
            expected = {
                "lru": (last_use,),
                "lcp": (uses * 0.25 ** ((now.num_tokens - last_token) / 2),),
                "least_stale": (
                    rank_then_last_use(
                        np.array(stale_ranks(layers, last_pass, now, text)), last_use
                    ),
                ),
            }[text.partition(":")[0]]
            assert np.array_equal(policy.order(keys, now), expected)
            policy.proposed(proposed, now)
            policy.prefetched(prefetched, now)
            for key in proposed + prefetched:  # what this pass has passed is for the next
                last_pass[key] = now.pass_index + (layers[key] <= now.layer)
            if text.endswith("load"):
                last_use[prefetched] = now.step
        if queues:
            assert [key for queue in queues for key in queue] == np.lexsort(
                (last_use, layers)
            ).tolist()
    if queues:
        policy.last_use[:] = last_use = last_use[::-1]
        policy.used([], step([[0, 1]]), now)
        assert [key for queue in queues for key in queue] == np.lexsort((last_use, layers)).tolist()


def stale_ranks(layers: np.ndarray, last_pass: np.ndarray, now: Now, text: str) -> list[int]:
    """Return the ranks of keys in the order of Least-Stale, given the pass that last used them or
    that they were proposed for."""
    ranks = []
    for layer, pass_index in zip(layers.tolist(), last_pass.tolist(), strict=True):
        is_current = pass_index >= now.pass_index
        coming = layer + 3 * (pass_index > now.pass_index)
        is_right = coming > now.layer
        if text.endswith("ascending"):
            ranks.append(6 * is_current + coming)
            continue
        group = 2 * is_right + is_current if text.endswith("left") else is_current
        ranks.append(9 * group + (8 - coming if is_right else coming))
    return ranks


@pytest.mark.parametrize(
    ("text", "is_fine"),
    [
        ("lfu:decay=1", True),
        ("lfu:decay=0.001", True),
        ("lfu:decay=0", False),
        ("lfu:decay=1.001", False),
        ("score:decay=1", True),
        ("score:decay=0.001", True),
        ("score:decay=0", False),
        ("score:decay=1.001", False),
        ("lcp:rho=1,omega=0.1", True),
        ("lcp:rho=0.001", True),
        ("lcp:rho=0", False),
        ("lcp:rho=1.001", False),
        ("lcp:omega=0", False),
        ("lcp:omega=-1", False),
        ("lcp:uses=tokens", True),
        ("lcp:uses=rows", False),
        ("least_stale:within=behind", False),
        ("lru:stamp=prefetch", False),
        ("fld:distance=far", False),
        ("score:of=none", False),
        ("map:over=some", False),
    ],
)
def test_parameters_at_their_limits(text: str, is_fine: bool) -> None:
    if is_fine:
        parse("eviction", text)
    else:
        with pytest.raises(BadUsage, match=text.split(":")[0]):
            parse("eviction", text)


RANKS = st.integers(-9, 9) | st.integers(1 - 2**29, 2**29 - 1)
STEPS = st.integers(-1, 3) | st.integers(0, 2**34 - 2)


@given(st.lists(st.tuples(RANKS, STEPS)))
@example([(1 - 2**29, -1), (2**29 - 1, 2**34 - 2), (2**29 - 2, 2**34 - 2), (2**29 - 1, -1)])
@settings(max_examples=50)
def test_two_sort_keys_in_one_sort_as_two(pairs: list[tuple[int, int]]) -> None:
    """Also after months, when a key has been used as many times as there were tokens."""
    rank, last_use = np.array(pairs, np.int64).reshape(-1, 2).T
    assert np.array_equal(
        rank_then_last_use(rank, last_use).argsort(kind="stable"), np.lexsort((last_use, rank))
    )
