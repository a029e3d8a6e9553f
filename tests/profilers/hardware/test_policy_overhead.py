"""The overhead of policies: each that can run has a figure, and a slower policy has a larger
one."""

import time

import pytest
import torch

from artifacts.hardware.profile import EACH_LOAD
from moectl.bundled import demo_model
from profilers.hardware.policy_overhead import _timed, deciding, places_a_layer
from runtime.model.open import open_model
from runtime.policies.prefetch.frequency import Frequency
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint


def test_a_policy_that_takes_its_time_is_found_out(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly = Frequency.propose

    def propose(self: Frequency, *arguments: object) -> object:
        time.sleep(5e-3)
        return slowly(self, *arguments)

    monkeypatch.setattr(Frequency, "propose", propose)
    opened = open_model(str(checkpoint("olmoe")))
    assert places_a_layer(opened) < opened.shape.num_experts
    found = deciding(opened, "50MB/s", tokens=5)
    assert found["prefetch frequency"] > 4e-3 > found["eviction lfu"] >= 0
    assert 0 < found[EACH_LOAD] < 4e-3
    assert "prefetch next_gate" in found and "eviction lru" not in found
    assert "prefetch learned" not in found, "which no store has fitted"
    assert opened.model.config._experts_implementation == "eager"


def test_what_is_brought_before_the_first_layer_is_no_layer_s() -> None:
    settings = Settings(policies={"prefetch": "map:semantic=yes"}, budget="25%", learn=True)
    with Session.open(str(demo_model()), settings) as session, torch.inference_mode():
        assert session.controller.opens_passes
        for token in (5, 5, 9):
            session.new_requests(1)
            assert len(_timed(session, torch.tensor([[token]]))) == session.opened.shape.num_layers
