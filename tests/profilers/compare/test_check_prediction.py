"""A prediction is of the same requests as its run, and follows from the given costs."""

from dataclasses import replace

import numpy as np
import pytest

from profilers.compare import check_prediction as prediction
from profilers.compare.check_prediction import check
from profilers.hardware.load_times import TimingEffort
from profilers.hardware.profile import measure
from runtime.model.open import open_model
from tests.conftest import Checkpoint
from tests.helpers.measured import made

PREFILL = 4
LENGTH = 9


@pytest.fixture
def sequences() -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(3, 96, (2, LENGTH)))


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "_TIMES", 1)
    monkeypatch.setattr(prediction, "_BETWEEN", TimingEffort(turns=2))


def test_it_is_of_the_run_and_adds_up(checkpoint: Checkpoint, sequences: list[np.ndarray]) -> None:
    folder = checkpoint("olmoe")
    opened = open_model(str(folder))
    made_of = measure(opened, folder, effort=TimingEffort(lengths=(), turns=2))
    found = check(opened, made_of, sequences, prefill=PREFILL)
    assert (found.preset, found.budget, found.link) == ("on-demand", "25%", "disk")
    assert found.tokens == 2 * (LENGTH - PREFILL)
    assert 0 < found.hit_rate < 1
    assert found.predicted_ms > 0 and found.measured_ms > found.measured_stall_ms >= 0
    assert found.ratio == pytest.approx(found.predicted_ms / found.measured_ms)
    assert found.ratio_at_pace == pytest.approx(found.ratio * found.pace)


def test_it_is_by_the_costs_given(checkpoint: Checkpoint, sequences: list[np.ndarray]) -> None:
    """When all experts are resident, a token takes two layers and the head: 47 s by hand."""
    opened = open_model(str(checkpoint("olmoe")))
    found = check(opened, made(), sequences, prefill=PREFILL, budget="100%")
    warm = 2 * (10 + 12) + 3
    # experts that the prompts did not select are loaded
    assert found.predicted_ms / 1e3 >= warm and found.hit_rate < 1
    slow = check(opened, made(scale=2.0), sequences, prefill=PREFILL, budget="100%")
    assert slow.predicted_ms == pytest.approx(2 * found.predicted_ms)
    assert found.pace < 1 and found.measured_ms < found.predicted_ms


def test_over_an_emulated_link(checkpoint: Checkpoint, sequences: list[np.ndarray]) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    by_hand = made()
    load = replace(by_hand.loads[0], link="50MB/s")
    by_hand = replace(
        by_hand, loads=(load,), conditions=dict(by_hand.conditions) | {"link": "50MB/s"}
    )
    found = check(opened, by_hand, sequences[:1], prefill=PREFILL, link="50MB/s")
    assert found.link == "50MB/s" and found.predicted_stall_ms > 0
