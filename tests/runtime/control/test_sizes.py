"""Budgets, sizes and rates as users write them."""

import pytest

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.control import sizes as budget

SHAPE = Shape(num_layers=8, num_experts=32, top_k=4, expert_nbytes=1 << 20)


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("25%", 64),
        ("96x", 96),
        ("64MiB", 64),
        ("64MB", 61),
        ("0.5GiB", 256),
        ("100%", 256),
        ("1000GiB", 256),
    ],
)
def test_a_budget_is_a_share_experts_or_bytes(text: str, slots: int) -> None:
    assert budget.num_slots(text, SHAPE, per_layer=True) == slots


@pytest.mark.parametrize(
    "text", ["abc", "", "-1GiB", "-25%", "nan", "inf%", "1e999x", "5 parsecs", "25%%", "1GB/s"]
)
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(BadUsage):
        budget.num_slots(text, SHAPE, per_layer=False)


@pytest.mark.parametrize(
    ("text", "per_layer"), [("0", False), ("0%", False), ("1000KB", False), ("7x", True)]
)
def test_less_than_one_expert_is_refused_and_the_least_named(text: str, per_layer: bool) -> None:
    with pytest.raises(BadUsage, match="give at least"):
        budget.num_slots(text, SHAPE, per_layer=per_layer)


def test_a_bare_number_is_taken_for_a_share_whose_sign_was_forgotten() -> None:
    with pytest.raises(BadUsage, match="did you mean 25%"):
        budget.check_budget("25")
    for text in ("25%", "4096", "96x", "2GiB"):
        budget.check_budget(text)


def test_one_expert_is_enough_in_global_scope() -> None:
    assert budget.num_slots("1x", SHAPE, per_layer=False) == 1


def test_rates() -> None:
    assert budget.rate("5GB/s") == (5e9, 0.0)
    assert budget.rate("1.5GiB/s+10us") == pytest.approx((1.5 * 2**30, 10e-6))
    for text in ("5GB", "0GB/s", "fast", "5GB/s+10", "5GB/s+10parsecs"):
        with pytest.raises(BadUsage):
            budget.rate(text)
