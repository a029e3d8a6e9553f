"""What the page is told of the last token; histograms of two servers in one process."""

import pytest
from prometheus_client import REGISTRY

from moectl.serving.guard import ServerLimits
from moectl.serving.metrics import live
from moectl.serving.scheduler import Scheduler
from moectl.serving.tally import Tally
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


def test_two_servers_in_one_process_count_apart() -> None:
    one, other = (Tally(num_layers=2) for _ in range(2))
    one.first("", 3, 0.3)
    counts = []
    for tally in (one, other):
        [family] = tally.to_first_token.collect()
        counts.append({each.labels.get("le", each.name): each.value for each in family.samples})
    assert (counts[0]["0.25"], counts[0]["0.5"], counts[0]["+Inf"]) == (0, 1, 1)
    assert counts[0]["moectl_time_to_first_token_seconds_sum"] == 0.3
    assert counts[1]["+Inf"] == 0 and REGISTRY.get_sample_value("moectl_passes_total") is None
