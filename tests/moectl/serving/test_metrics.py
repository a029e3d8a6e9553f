"""What the page is told of the last token."""

import pytest

from moectl.serving.guard import ServerLimits
from moectl.serving.metrics import live
from moectl.serving.scheduler import Scheduler
from runtime.control.counters import Counter
from runtime.model.open import MoeModel
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from tests.moectl.serving.test_scheduler import Asked


@pytest.mark.parametrize("preset", ["full", "on-demand", "near", "specmd", "moepic"])
def test_the_experts_of_the_last_token(opened: MoeModel, preset: str) -> None:
    """As many by layer, there and not there, as the last pass counted; with every expert there
    nothing is missed."""
    settings = Settings(preset=preset, budget="25%", link="disk", window="0B", threads=1)
    scheduler = Scheduler(lambda name: Session.over(opened, settings), preset, ServerLimits())
    scheduler.start()
    try:
        assert live(scheduler)["last_token"] == []
        job = Asked(9)
        job.sampling = Sampling(ignore_eos=True, temperature=2.0, seed=1)
        scheduler.submit(job)
        job.end()
        told = live(scheduler)["last_token"]
        counters = scheduler.session.controller.counters.passes[-1]
    finally:
        scheduler.close()
    shape = opened.shape
    assert [len(one["hit"]) + len(one["missed"]) for one in told] == [
        shape.top_k
    ] * shape.num_layers
    assert all(set(one["hit"] + one["missed"]) <= set(range(shape.num_experts)) for one in told)
    if preset != "moepic":  # which counts pieces of experts
        assert [len(one["missed"]) for one in told] == counters[Counter.MISSES].tolist()
    assert any(one["missed"] for one in told) == (preset != "full")
