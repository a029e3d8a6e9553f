"""What the page is told of the last token; histograms of two servers in one process; the board of
Grafana."""

import json
import re
from itertools import combinations

import httpx2
import pytest
from openai import OpenAI
from prometheus_client import REGISTRY

from moectl.serving.guard import ServerLimits
from moectl.serving.metrics import live
from moectl.serving.scheduler import Scheduler
from moectl.serving.tally import Tally
from runtime.control.counters import Counter
from runtime.model.open import MoeModel
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from tests import ROOT
from tests.helpers.serving import EXACT, Running, idle
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


def test_the_board_asks_for_what_is_served(
    server: Running, client: OpenAI, web: httpx2.Client
) -> None:
    """A request was answered; each expression names metrics that are there, and by labels that they
    have."""
    client.completions.create(prompt="sheep", max_tokens=3, user="u", **EXACT)
    idle(server)
    served = web.get("/metrics").text
    labels: dict[str, set[str]] = {}
    for name, braces in re.findall(r"^(\w+)(\{.*\})? ", served, re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', braces))
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    panels = board["panels"]
    for panel in panels:
        for target in panel["targets"]:
            names = re.findall(r"(?:moectl|process)_\w+", target["expr"])
            by = set(re.findall(r"by \((\w+)\)", target["expr"]))
            assert names and labels.keys() >= {*names}, panel["title"]
            assert by == set(re.findall(r"{{(\w+)}}", target["legendFormat"])) | (by & {"le"})
            assert all(by <= labels[name] for name in names)
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [cells_of(**panel["gridPos"]) for panel in panels]
    assert not any(one & other for one, other in combinations(cells, 2))
    uid = {panel["datasource"]["uid"] for panel in panels}
    assert uid == {f"${{{board['__inputs'][0]['name']}}}"}
    assert {"title", "uid", "schemaVersion", "templating", "time"} <= board.keys()


def cells_of(*, h: int, w: int, x: int, y: int) -> set[tuple[int, int]]:
    assert x + w <= 24
    return {(column, row) for column in range(x, x + w) for row in range(y, y + h)}


def test_times_and_bytes_of_a_request_are_counted(
    server: Running, client: OpenAI, web: httpx2.Client
) -> None:
    def read() -> dict[str, float]:
        lines = re.findall(r"^(moectl_\w+) (\S+)$", web.get("/metrics").text, re.MULTILINE)
        return {name: float(value) for name, value in lines}

    before = read()
    stream = client.completions.create(prompt="sheep", max_tokens=60, stream=True, **EXACT)
    next(iter(stream))
    during = read()
    for _ in stream:
        pass
    idle(server)
    after = read()
    assert during["moectl_cache_bytes"] > 0 and after["moectl_cache_bytes"] == 0
    for name in ("request_queue", "time_to_first_token", "request_duration"):
        name = f"moectl_{name}_seconds"
        assert after[f"{name}_count"] - before[f"{name}_count"] == 1
        assert after[f"{name}_sum"] > before[f"{name}_sum"]
    name = "moectl_time_per_output_token_seconds_count"
    assert after[name] - before[name] == 59
    assert after["moectl_fast_tier_bytes"] > 0
