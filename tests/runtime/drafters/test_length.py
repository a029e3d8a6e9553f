"""Lengths of drafts on machines and drafters that are drawn: near the best fixed length, and hardly
slower than without drafts."""

import numpy as np
import pytest

from runtime.drafters.base import DraftPart
from runtime.drafters.length import MeasuredLengths

PLAIN_S = 0.01


def chosen_s(acceptance: float, rise: float, draft: float) -> float:
    """Seconds a token by the scheduler, where a pass takes 1 + rise plain ones for each draft, with
    noise, and a draft takes `draft`."""
    draws = np.random.default_rng(7)
    lengths = MeasuredLengths(["one"])
    seconds = tokens = 0
    while tokens < 1500:
        asked = dict(lengths.plan()).get("one", 0)
        right = draws.random(asked) < acceptance
        accepted = int(np.argmin(np.append(right, False)))
        took = PLAIN_S * (1 + rise * asked) * draws.lognormal(0, 0.1)
        draft_s = asked * draft * PLAIN_S
        lengths.note(asked, accepted, pass_s=took, draft_s=draft_s)
        seconds += took + draft_s
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
    lengths = MeasuredLengths(["good", "fair"])
    for _ in range(2):
        lengths.note(0, 0, pass_s=1.0, draft_s=0.0)
    for _ in range(20):
        for lengths.chosen, accepted in (("good", 4), ("fair", 2)):
            lengths.note(4, accepted, pass_s=1.3, draft_s=0.0)
        lengths.note(0, 0, pass_s=1.0, draft_s=0.0)
    assert [name for name, _ in lengths.plan()] == ["good", "fair"]
    assert lengths.plan(0) == []
    assert lengths.receipt()["k"] == {"0": 22, "4": 40}


def test_a_pass_that_compiles_does_not_end_drafting() -> None:
    lengths = MeasuredLengths(["one"])
    for drafted, pass_s in ((0, 0.01), (0, 0.01), (1, 5.0), (0, 0.01)):
        lengths.note(drafted, drafted, pass_s=pass_s, draft_s=0.0)
    assert lengths.next()


def test_a_change_of_the_text_is_noticed() -> None:
    lengths = MeasuredLengths(["one"])

    def mean_length(accepted: float, num_passes: int) -> float:
        """Drafts a pass over some passes in which this share of them is accepted."""
        asked = 0
        for _ in range(num_passes):
            length = lengths.next()
            pass_s = 1 + 0.3 * length
            lengths.note(length, int(accepted * length), pass_s=pass_s, draft_s=0.0)
            asked += length
        return asked / num_passes

    assert mean_length(1.0, 100) > 4
    mean_length(0.0, 60)
    assert mean_length(0.0, 100) < 0.1
    mean_length(1.0, 200)
    assert mean_length(1.0, 100) > 4


def test_requests_that_share_passes_are_told_apart_from_one_alone() -> None:
    lengths = MeasuredLengths(["one"])
    asked = {1: 0, 4: 0}
    for number in range(400):
        requests = 1 if number % 2 else 4
        lengths.share(requests)
        length = lengths.next()
        asked[requests] += length
        # one of them has nothing to draft; in company a draft takes all that a token does
        parts = [DraftPart("one", length, length, 1 + length)] * (requests - 1)
        parts.append(DraftPart("one", length if requests == 1 else 0, length, 1))
        num_drafted = sum(part.num_drafted for part in parts)
        lengths.note_pass(parts, pass_s=requests + (1.5 if requests == 4 else 0.1) * num_drafted)
    assert asked[1] > 6 * 200 * 0.9 and asked[4] < 0.1 * 200
    lengths.share(1)
    assert lengths.seconds()[0] == pytest.approx(1.0)
    assert lengths.seconds()[-1] == pytest.approx(1.8, rel=0.05), "of the widths that it takes"


def test_a_dear_second_token_does_not_hide_that_further_ones_are_cheap() -> None:
    lengths = MeasuredLengths(["resident"])
    for _ in range(8):
        lengths.note(0, 0, pass_s=1.0, draft_s=0.0)
        lengths.note(1, 1, pass_s=1.7, draft_s=0.1)
    assert lengths.seconds()[3:5] == pytest.approx([2.1, 2.3], abs=0.1)
    assert lengths.next() > 1
