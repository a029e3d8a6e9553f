"""What the reference in tests/runtime/reference.py does not cover: precisions, and the future."""

import numpy as np

from artifacts.nextuse import NEVER, NextUse
from runtime.policies.base import Eviction, Now
from tests.runtime.policies.examples import prepared, step


def order(policy: Eviction, now: Now) -> list[int]:
    """Layer 0 in the order in which it would leave."""
    return np.lexsort(policy.order(np.arange(6), now)[::-1]).tolist()


def test_lhu_counts_uses_at_full_precision_only() -> None:
    policy, wanted = prepared("eviction", "lhu"), step([[0, 1]])
    policy.fetched({0: 16, 1: 4}, Now(step=0))
    policy.used([0, 1], wanted, Now(step=0))
    policy.used([1], wanted, Now(step=1))  # still the low replica
    policy.used([2], wanted, Now(step=2))
    assert order(policy, Now(step=3)) == [3, 4, 5, 1, 0, 2]
    policy.fetched({1: 16}, Now(step=3))
    policy.used([1], wanted, Now(step=3))
    assert order(policy, Now(step=4)) == [3, 4, 5, 0, 2, 1]
    policy.fetched({2: 2}, Now(step=4))
    policy.prefetched([2], Now(step=4))  # prefetches come in full
    policy.used([2], wanted, Now(step=5))
    assert order(policy, Now(step=6)) == [3, 4, 5, 0, 1, 2]


def test_belady_evicts_what_is_wanted_last() -> None:
    first = np.array([0, 3, 1, NEVER, 2, NEVER, *[NEVER] * 12])
    future = NextUse(first, (np.array([0]), np.array([2])), (np.array([NEVER]), np.array([2])))
    policy = prepared("eviction", "belady", next_use=future)
    assert order(policy, Now(step=-1)) == [3, 5, 1, 4, 2, 0]
    policy.used([0], step([[0, 0]]), Now(step=0))
    assert order(policy, Now(step=0)) == [0, 3, 5, 1, 4, 2]
    policy.used([], step([[2, 2]]), Now(step=1))  # 2 was wanted, whoever served it
    assert order(policy, Now(step=1)) == [0, 3, 5, 1, 2, 4]
