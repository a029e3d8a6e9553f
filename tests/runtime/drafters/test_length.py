"""Lengths of drafts on machines and drafters that are drawn: near the best fixed length, and hardly
slower than without drafts."""

import numpy as np
import pytest

from runtime.drafters.length import Lengths, Passed

PLAIN_S = 0.01


def chosen_s(acceptance: float, rise: float, draft: float) -> float:
    """Seconds a token by the scheduler, where a pass takes 1 + rise plain ones for each draft, with
    noise, and a draft takes `draft`."""
    draws = np.random.default_rng(7)
    lengths = Lengths(["one"])
    seconds = tokens = 0
    while tokens < 1500:
        asked = dict(lengths.plan()).get("one", 0)
        right = draws.random(asked) < acceptance
        accepted = int(np.argmin(np.append(right, False)))
        took = PLAIN_S * (1 + rise * asked) * draws.lognormal(0, 0.1)
        passed = Passed("one", asked, accepted, took, asked * draft * PLAIN_S)
        lengths.note(passed)
        seconds += passed.seconds + passed.draft_s
        tokens += 1 + accepted
    return seconds / tokens


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("rise", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("draft", [0.0, 0.3])
def test_the_length_is_near_the_best_and_loses_little(
    acceptance: float, rise: float, draft: float
) -> None:
    fixed = [
        PLAIN_S * (1 + (rise + draft) * length) / sum(acceptance**n for n in range(length + 1))
        for length in range(9)
    ]
    assert chosen_s(acceptance, rise, draft) <= min(1.08 * min(fixed), 1.03 * fixed[0])


def test_the_better_of_two_drafters_comes_first_and_the_other_behind_it() -> None:
    lengths = Lengths(["good", "fair"])
    for _ in range(2):
        lengths.note(Passed("", 0, 0, 1.0))
    for _ in range(20):
        for name, accepted in (("good", 4), ("fair", 2)):
            lengths.note(Passed(name, 4, accepted, 1.3))
        lengths.note(Passed("", 0, 0, 1.0))
    assert [name for name, _ in lengths.plan()] == ["good", "fair"]
    assert lengths.plan(0) == []
    assert lengths.receipt()["passes"] == {"0": 22, "4": 40}


def test_a_pass_that_compiles_does_not_end_drafting() -> None:
    lengths = Lengths(["one"])
    for _ in range(3):
        lengths.note(Passed("", 0, 0, 0.01))
    lengths.note(Passed("one", 1, 1, 5.0))
    for _ in range(4):
        lengths.note(Passed("", 0, 0, 0.01))
    assert lengths.plan()


def test_a_change_of_the_text_is_noticed() -> None:
    lengths = Lengths(["one"])

    def drafted(accepted_share: float, num_passes: int) -> float:
        asked = 0
        for _ in range(num_passes):
            length = dict(lengths.plan()).get("one", 0)
            lengths.note(
                Passed("one" * bool(length), length, int(accepted_share * length), 1 + 0.3 * length)
            )
            asked += length
        return asked / num_passes

    assert drafted(1.0, 100) > 4
    drafted(0.0, 60)
    assert drafted(0.0, 100) < 0.1
    drafted(1.0, 200)
    assert drafted(1.0, 100) > 4


def test_a_fixed_length_is_kept_and_fits_what_is_left() -> None:
    lengths = Lengths(["one"], num_drafts=4)
    lengths.note(Passed("one", 4, 1, 1.0))
    assert lengths.plan() == [("one", 4)]
    assert lengths.plan(2) == [("one", 2)]
    assert Lengths(["one"], num_drafts=0).plan() == []
