"""The combinations that a search may try: all of them build, none occurs twice, and those called
lossless are."""

import pytest

from runtime.policies import build
from runtime.search.space import Combination, drawn, lossless, lossy, neighbours

SPACES = {"lossless": lossless(0.3125), "lossy": lossy(0.3125)}


@pytest.mark.parametrize("name", SPACES)
def test_every_value_is_a_policy_and_no_combination_is_there_twice(name: str) -> None:
    space = SPACES[name]
    assert len(space) == len(set(space)) > 500
    for one in {one._replace(prefetch="none", eviction="lru", scope="layer") for one in space}:
        build(one.policies)
    for axis in ("prefetch", "eviction"):
        for text in {getattr(one, axis) for one in space}:
            build(Combination(**{axis: text}).policies)
    assert set(SPACES["lossless"]).isdisjoint(SPACES["lossy"])


def test_the_lossless_space_has_no_replicas_stand_ins_or_other_routing() -> None:
    assert {name: {one.is_lossless for one in space} for name, space in SPACES.items()} == {
        "lossless": {True},
        "lossy": {False},
    }
    assert {one.routing for one in SPACES["lossless"]} == {"standard"}
    assert {one.miss.partition(":")[0] for one in SPACES["lossless"]} == {
        "fetch",
        "near",
        "qstar",
        "behind",
        "cold",
    }
    assert not any(
        "bits" in one.residency or "shadow" in one.residency for one in SPACES["lossless"]
    )


def test_parts_go_together() -> None:
    for one in (*SPACES["lossless"], *SPACES["lossy"]):
        assert ("shadow" in one.miss) == ("shadow" in one.residency) and ("cold" in one.miss) == (
            "hot" in one.residency
        )


def test_stored_replicas_of_8_bits_join_the_space_and_others_change_nothing() -> None:
    assert lossy(0.3125, [1, 2, 3]) == SPACES["lossy"]
    more = {*lossy(0.3125, [2, 8])} - {*SPACES["lossy"]}
    assert {(one.miss, one.residency) for one in more if "shadow" not in one.miss} == {
        ("fetch_priority:bits=8", residency) for residency in ("uniform", "allocated")
    }
    assert {one.residency for one in more if "shadow" in one.miss} == {
        "shadow:bits=8",
        "shadow:bits=8,slots=no",
    }


def test_drawing_gives_every_family_its_turn_and_is_the_same_for_a_seed() -> None:
    space = SPACES["lossy"]
    few = drawn(space, 60, seed=1)
    counts = [sum(other.family == one.family for other in few) for one in few]
    assert max(counts) - min(counts) <= 1 and len(set(few)) == 60
    assert drawn(space, 60, seed=1) == few != drawn(space, 60, seed=2)
    assert set(drawn(space, len(space) + 5, seed=1)) == set(space)


def test_neighbours_differ_on_one_axis_or_in_miss_and_residency_together() -> None:
    one = Combination(miss="cold", residency="hot", prefetch="next_gate")
    near = neighbours(one, SPACES["lossless"])
    assert (
        Combination(prefetch="next_gate") in near
        and Combination(miss="cold", residency="hot") in near
    )
    assert Combination() not in near and one not in near
