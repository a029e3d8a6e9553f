"""The tool that measures what quantising holds: it measures, and its verdict follows the
figures."""

import argparse

from tests.conftest import Checkpoint
from tools.bench.quality import quantize_memory


def test_it_measures_a_run_that_it_stops(checkpoint: Checkpoint) -> None:
    options = argparse.Namespace(experts=2, jobs=1, samples=40)
    found = quantize_memory.measure(checkpoint("olmoe"), options)
    assert found["calibrating"] >= found["imports"] > 100 << 20
    assert found["tokens"] > 1000 and found["inputs"] == found["tokens"] * 32 * 4
    assert found["experts"] == 16 * found["expert"]


def test_the_verdict_follows_the_figures() -> None:
    small = {
        "imports": 300 << 20,
        "calibrating": 400 << 20,
        "worker": 350 << 20,
        "others": 20 << 20,
    }
    small |= {"inputs": 20 << 20, "expert": 3 << 20, "experts": 1 << 30, "tokens": 9000}
    assert quantize_memory._show(small, 1 << 30) == 0
    assert quantize_memory._show(small | {"calibrating": 1 << 30}, 1 << 30) == 1
    assert quantize_memory._show(small | {"experts": 100 << 20}, 1 << 30) == 1
