"""Buddy lists against exact fractions, and edge cases."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from artifacts.routing.buddies import buddy_lists, buddy_table
from artifacts.routing.coactivation import conditional


def by_hand(pairs, alpha, k_max):
    """The definition, literally, in fractions."""
    lists = []
    for pivot, row in enumerate(pairs):
        peers = [(-count, peer) for peer, count in enumerate(row) if peer != pivot and count > 0]
        total = -sum(count for count, _ in peers)
        sum_q = Fraction(0)
        buddies = []
        for count, peer in sorted(peers):
            if buddies and (sum_q >= alpha or len(buddies) == k_max):
                break
            buddies.append(peer)
            sum_q += Fraction(-count, total)
        lists.append(buddies)
    return lists


@given(
    st.integers(1, 7).flatmap(
        lambda size: st.lists(
            st.lists(st.integers(0, 9), min_size=size, max_size=size), min_size=size, max_size=size
        )
    ),
    st.sampled_from(["0", "0.1", "0.5", "0.7", "0.9", "0.95", "1", "1.5"]),
    st.integers(1, 7),
)
def test_equals_the_definition_in_exact_arithmetic(pairs, alpha, k_max):
    assert buddy_lists(conditional(np.array(pairs)), float(alpha), k_max) == by_hand(
        pairs, Fraction(alpha), k_max
    )


def test_ties_go_to_the_lower_id():
    assert buddy_lists(np.array([[0, 0.25, 0.5, 0.25]]), 0.6, 16) == [[2, 1]]


def test_a_full_alpha_takes_every_companion_and_no_stranger():
    # in floating point, ten tenths sum to slightly less than one
    row = np.array([0.0] + [0.1] * 10 + [0.0])
    assert np.cumsum(row)[-1] < 1
    assert buddy_lists(row[None], 1.0, 99) == [list(range(1, 11))]


def test_an_active_pivot_has_one_and_an_inactive_none():
    assert buddy_lists(np.array([[0, 1.0], [0, 0]]), 0.0, 1) == [[1], []]


def test_table_is_padded():
    assert buddy_table([[2, 1], [], [0]]).tolist() == [[2, 1], [-1, -1], [0, -1]]
    assert buddy_table([[], []]).tolist() == [[-1], [-1]]
