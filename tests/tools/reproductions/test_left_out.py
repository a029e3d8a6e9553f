"""Statements that were left out at first: what their tests measure, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from artifacts.modelshapes.known import unsized
from artifacts.traces.parquet import read_parquet
from artifacts.traces.synthetic import Dials, generate
from runtime.policies.presets import preset
from tests import TRACE
from tools.reproductions.fmoe.folds import Folds
from tools.reproductions.fmoe.rivals import GRIDS
from tools.reproductions.fmoe.search import correlation, searched
from tools.reproductions.moepic.bench import SYSTEMS, Conditions
from tools.reproductions.moepic.rivals import serial
from tools.reproductions.specmd import figures
from tools.reproductions.specmd.foresight import _pairs
from tools.reproductions.specmd.mixes import MISSES, MIXES, _of_size


def test_every_mix_of_table_1_is_run_or_named_as_undetermined() -> None:
    named = {mix for rows in figures.TABLE_1.values() for mix in rows}
    assert named == {*MIXES, "config 1", "config 3", "8 bits"} and len(MISSES) == 5
    for name, _, own, off in MIXES.values():
        assert (preset(name).texts() | own) != (preset(name).texts() | off), "nothing is off"


@pytest.mark.parametrize(
    ("ours", "passes"),
    [([0.7, 0.5, 0.5, 1.0], True), ([0.9, 0.8, 0.4, 0.7], False), ([1.0] * 4, False)],
)
def test_an_effect_has_its_sign_and_size_in_three_of_four(ours: list[float], passes: bool) -> None:
    assert _of_size([0.7, 0.4, 0.4, 0.7])(np.array(ours)) is passes


def test_precision_and_recall_are_of_the_layer_ahead() -> None:
    """A random choice has k / E of both; what `score` names holds the top k, here 3 of 16."""
    dials = Dials(tokens=400, requests=2, predictability=0.8, grading=0.9)
    trace = generate(dials, unsized(4, 16, 2).shape)
    pairs = _pairs(trace, 2)
    named = pairs["next_gate"]
    score = pairs["score"]
    assert named == pytest.approx((0.8, 0.8), abs=0.05)
    assert pairs["random"] == pytest.approx((2 / 16, 2 / 16), abs=0.04)
    assert score[0] < named[0] and score[1] > named[1]


def test_maps_of_the_same_requests_name_their_own_experts() -> None:
    recorded = read_parquet(TRACE, num_experts=32)
    folds = Folds(recorded.take(recorded.token < 34), unsized(8, 32, 4), "a trace")
    few, more = (searched(folds, capacity) for capacity in (4, 100))
    for kind in ("semantic", "trajectory"):
        assert few.scores[kind].mean() < more.scores[kind].mean() <= 1
        assert 0 < few.hits[kind].mean() <= 1
    own = replace(folds.parts[0], others=folds.parts[0].replayed)
    folds.parts[:] = [own]
    same = searched(folds, 100)
    assert same.scores["semantic"] == pytest.approx(1, abs=1e-5)
    assert same.hits["semantic"].mean() > more.hits["semantic"].mean()


def test_a_correlation_counts_what_is_weighted() -> None:
    x = np.array([0.0, 1.0, 2.0, 9.0])
    y = np.array([0.0, 2.0, 4.0, -9.0])
    weights = np.array([[1, 1, 1, 0], [1, 1, 1, 1]])
    assert correlation(x, y, weights) == pytest.approx([1, np.corrcoef(x, y)[0, 1]])


def test_a_serial_rival_takes_longer_and_moves_the_same() -> None:
    dials = Dials(skew=0.3, tokens=60, requests=1, prompt=8)
    conditions = Conditions("mixtral-8x7b", 3.875, 75.0, 2, dials)
    name = "MoE-Infinity"
    assert conditions.tpot_ms(serial()[f"{name}, serial"], 160) > conditions.tpot_ms(
        SYSTEMS[name], 160
    )


def test_the_papers_own_settings_are_in_the_grids() -> None:
    for prefetches, evictions in GRIDS.values():
        assert {"lru", "lfu", "class_lru"} <= {*evictions} and prefetches
