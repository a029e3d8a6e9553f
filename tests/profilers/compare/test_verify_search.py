"""Live runs verify predictions: quality against the full model, times side by side, the first good
candidate."""

import numpy as np
import pytest

from profilers.compare.bench import BenchText
from profilers.compare.verify_search import FULL, Verifier, fastest, first_within
from profilers.hardware.live_costs import LiveCosts
from runtime.model.open import open_model
from runtime.policies.base import Artefacts
from runtime.search.results import Tried
from runtime.search.space import Combination
from tests.conftest import Checkpoint

WORSE = Combination(miss="zero:fill=no")
BETTER = Combination(miss="drop:rank=1")


def tried(combination: Combination, ms: float, loss: float | None) -> Tried:
    return Tried(combination, ms, loss, 0.0, 0.0, 0, 0.0, damage=(0.0, 1.0), altered=1)


@pytest.fixture(scope="module")
def verifier(checkpoint: Checkpoint) -> Verifier:
    opened = open_model(str(checkpoint("olmoe")))
    rows = np.random.default_rng(0).integers(0, opened.config.vocab_size, (3, 16))
    pace = LiveCosts(
        {"link": "50MB/s", "experts": "exact"}, costs=None, machine=None, window=0, source=""
    )
    return Verifier(opened, Artefacts(), BenchText(tuple(rows), 8), pace, budget="25%", timed=2)


def test_quality_is_against_the_full_model(verifier: Verifier) -> None:
    exact, worse, better = (verifier.quality(one) for one in (Combination(), WORSE, BETTER))
    assert (exact.loss, exact.top1) == (0, 1) and exact.kl < 1e-9
    assert worse.kl > better.kl > 1e-6
    assert verifier.measured().keys() >= {WORSE, BETTER} and verifier.quality(WORSE) is worse


def test_the_first_that_a_live_run_finds_good_enough(verifier: Verifier) -> None:
    """Both are predicted to lose little, but the faster one loses more than the limit."""
    losses = {one: verifier.quality(one).loss for one in (WORSE, BETTER)}
    kept = min(losses, key=losses.get)
    other = WORSE if kept == BETTER else BETTER
    candidates = [tried(kept, 2.0, 1e-9), tried(other, 1.0, 1e-9), tried(Combination(), 0.1, None)]
    found, measured = first_within(
        verifier, candidates, (losses[WORSE] + losses[BETTER]) / 2, most=6
    )
    assert found.combination == kept and measured.keys() == {kept, other}
    assert first_within(verifier, candidates, min(losses.values()) - 1e-3, most=1)[0] is None
    found, measured = first_within(
        verifier, candidates, min(losses.values()) - 1e-3, most=6, is_late=lambda: True
    )
    assert found is None and len(measured) == 1


def test_what_is_faster_as_predicted_goes_first_and_equal_times_by_loss(verifier: Verifier) -> None:
    order = [tried(WORSE, 1.001, 0.2), tried(BETTER, 1.0, 0.1)]
    found, measured = first_within(verifier, order, 9.0, most=1)
    assert found.combination == BETTER and len(measured) == 1


def test_beside_each_other(verifier: Verifier) -> None:
    told: list[tuple[int, int]] = []
    named = {
        "one": Combination(),
        "two": Combination(miss="near"),
        "on-demand": "on-demand",
        "shadow": "shadow",
    }
    found = verifier.beside(
        named, rounds=2, seed=0, progress=lambda done, total: told.append((done, total))
    )
    assert found.keys() == {FULL, "one", "two", "on-demand"}, "no replicas, no shadow"
    assert {one.num_rounds for one in found.values()} == {2}
    assert found[FULL].to_full == 1 and found["one"].to_full > 0 and told
    assert found["one"].measured.counters == found["on-demand"].measured.counters
    assert (
        fastest(found, ["one", "two", "shadow"]) in ("one", "two")
        and fastest(found, ["shadow"]) is None
    )


def test_when_it_is_late_only_what_is_needed_is_measured_once(verifier: Verifier) -> None:
    named = {"one": Combination(), "on-demand": "on-demand", "near": "near"}
    late = {"rounds": 9, "seed": 0, "progress": lambda *_: None, "is_late": lambda: True}
    found = verifier.beside(named, needed=["one"], **late)
    assert {name: one.num_rounds for name, one in found.items()} == {FULL: 1, "one": 1}
