"""Figures of the documents that do not depend on the machine are those that a run gives today."""

import re
from pathlib import Path

import pytest

from artifacts.hardware.machines import machine
from moectl.bundled import demo_model
from moectl.commands.start import demo
from moectl.shared.opening import open_quietly
from moectl.shared.trace_source import TraceSource, open_source
from runtime.control.counters import hit_rate
from runtime.links.clock import ThreadClock
from runtime.policies.base import Artefacts
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload
from runtime.session.probe import Rates, scaled_window
from tests import ROOT

pytestmark = pytest.mark.slow

MACHINE = "rtx3090-pcie4"


def rows(page: str, *columns: str) -> list[dict[str, str]]:
    """Return the rows of the first table of a page that has all of the columns."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *body = [
            [cell.strip(" `") for cell in line.strip("|\n").split("|")]
            for line in table.splitlines()
        ]
        if {*columns} <= {*head}:
            return [dict(zip(head, cells, strict=True)) for cells in body]
    raise AssertionError(f"{page} has no table of {columns}")


@pytest.fixture(scope="module")
def hit_rates() -> dict[tuple[str, str], float]:
    """Return the hit rates of presets of `moectl demo` by preset and share held, without its
    waiting for the link."""
    opened = open_quietly(str(demo_model()))
    window = scaled_window(opened.shape, machine(MACHINE))
    at_once = Rates(link=1e15, near=1e15)
    held = [
        ("on-demand", "25%"),
        ("near", "25%"),
        ("on-demand", "50%"),
    ]  # `horizon` hits by what came in time
    entries = [
        demo._Entry(preset, budget, demo._session(preset, budget, Artefacts(), at_once, window))
        for preset, budget in held
    ]
    try:
        demo._measure(entries, demo._held_out(opened), ThreadClock())
        return {(one.preset, one.budget): demo._row(one, entries[0]).hit_rate for one in entries}
    finally:
        for entry in entries:
            entry.session.close()


def test_hit_rates_of_the_demo(hit_rates: dict[tuple[str, str], float]) -> None:
    """Within one in the last digit: vectors of another width sum otherwise, and a router then
    chooses another of two experts that are nearly equal (.565 on AVX2, .566 on AVX-512)."""
    told = {
        (row["preset"], row["held"].replace(" ", "")): row["hit rate"]
        for row in rows("README.md", "held", "hit rate")
    }
    for key, rate in hit_rates.items():
        assert abs(float(told[key]) - round(rate, 3)) < 0.0015, key


def test_evictions_on_a_clock() -> None:
    """README and docs/measure.md tell of the same replays of the bundled trace of gpt-oss-20b."""
    source = open_source(TraceSource(trace=Path("gpt-oss-20b")))
    workload = Workload(source.trace, source.model, machine(MACHINE))
    told = {row["policies"]: row for row in rows("docs/measure.md", "policies", "demand")}
    said = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for name in ("lru", "horizon"):
        outcome = workload.run(
            Setting(name, policies={"eviction": name}, scope="global", budget="25%")
        )
        share = hit_rate(outcome.counters)
        token_ms = outcome.times["tpot_ms"]
        assert (
            told[name]["hit rate"] == f"{share:.3f}"
            and told[name]["ms a token"] == f"{token_ms:.1f}"
        )
        assert told[name]["misses"] == f"{outcome.counters['misses']:,}"
        assert f"{share:.0%}".replace("%", " %") in said and f"{token_ms:.1f}" in said
