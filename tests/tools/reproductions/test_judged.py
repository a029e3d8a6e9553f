"""A measured statement is judged beside its null test, over seeds or resampled requests."""

import numpy as np
import pytest

from tools.reproductions.judged import above, by_request, by_seed, left_out, near, within_times
from tools.reproductions.report import NOT_TESTABLE, Claim, Kind, Null, Reproduction


@pytest.mark.parametrize(
    ("ours", "null", "verdict"),
    [
        ([0.09, 0.11, 0.07], 0.0, "agrees"),
        ([0.19, 0.17, 0.02], 0.0, "DISAGREES"),  # the mean decides, not the one that is near
        ([0.09, 0.10, 0.11], 0.08, "not told apart"),
    ],
)
def test_the_mean_of_seeds_is_judged_beside_its_null_test(
    ours: list[float], null: float, verdict: str
) -> None:
    claim = by_seed("gain", "10 %", ours, off="lru", null=[null] * 3, test=near(0.09, 0.3))
    assert claim.verdict == verdict and str(claim.null).startswith("lru: ")
    assert f"passes with {sum(abs(one - 0.09) <= 0.027 for one in ours)} of 3" in claim.spread


@pytest.mark.parametrize(
    ("value", "half", "verdict"),
    [(0.1, 0.05, "agrees"), (0.1, 0.2, "cannot be said"), (-0.1, 0.05, "DISAGREES")],
)
def test_a_gain_is_told_only_where_its_interval_leaves_out_zero(
    value: float, half: float, verdict: str
) -> None:
    resampled = np.concatenate([[value], np.linspace(value - half, value + half, 1000)])
    claim = by_request("gain", "yes", resampled, off="lru", null=0.0, test=above())
    assert claim.verdict == verdict and not claim.null.holds


def test_a_gain_far_from_its_size_disagrees_though_zero_is_inside() -> None:
    resampled = np.concatenate([[0.01], np.linspace(-0.01, 0.03, 1000)])
    test = within_times(0.4, 2)
    assert by_request("g", "40 %", resampled, off="lru", null=0.0, test=test).holds is False


@pytest.mark.parametrize(
    "missing",
    [
        {"kind": Kind.MEASURED},
        {"kind": Kind.MEASURED, "null": Null("lru", "0", False)},
        {"kind": Kind.DERIVED, "null": Null("lru", "0", False), "spread": "3 seeds"},
        {"kind": Kind.LEFT_OUT},
    ],
)
def test_a_row_lacks_neither_class_nor_null_test(missing: dict) -> None:
    with pytest.raises(AssertionError):
        Claim("a", "1", "1", True, **missing)
    with pytest.raises(TypeError):
        Claim("a", "1", "1", True)


def test_only_measured_statements_are_counted() -> None:
    claims = (
        by_seed("a", "yes", [1.0], off="lru", null=[0.0], test=above()),
        by_seed("b", "yes", [1.0], off="lru", null=[1.0], test=above()),
        Claim("c", "1", "1", True, Kind.DERIVED),
        Claim("d", "1", "2", False, Kind.FITTED),
        left_out("e", "1", "a GPU", NOT_TESTABLE),
    )
    counted = Reproduction("toy", "A paper", {}, claims, ()).counted
    assert counted == (
        "1 of 2 measured statements agree; beside them 1 derived, 1 fitted, 1 not testable here"
    )
