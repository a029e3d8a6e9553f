"""Dials of synthetic traces recovered from their effects."""

from dataclasses import replace

import pytest

from artifacts.errors import BadUsage
from artifacts.modelshapes.known import ModelShape
from artifacts.shape import Shape
from artifacts.traces.synthetic import Dials, generate
from tools.lab.fit_synthetic import (
    HitRates,
    fit_hit_rates,
    fit_statistics,
    hit_rates,
    misfit,
    parse_hit_rates,
)
from tools.lab.trace_statistics import measure

pytestmark = pytest.mark.slow

SHAPE = Shape(num_layers=3, num_experts=12, top_k=3, expert_nbytes=1)
MODEL = ModelShape("small", SHAPE, hidden=16)
ROWS = [HitRates("lru", {3: 0.0, 6: 0.0, 9: 0.0}), HitRates("lfu", {3: 0.0, 6: 0.0, 9: 0.0})]


@pytest.mark.parametrize("seed", range(2))
def test_statistics_are_reached_on_other_random_numbers(seed: int) -> None:
    real = Dials(
        skew=1.1,
        locality=0.35,
        similarity=0.6,
        predictability=0.8,
        tokens=800,
        requests=4,
        seed=seed,
    )
    real = replace(real, grading=0.6 * seed)
    target = measure(generate(real, SHAPE), SHAPE.num_experts)
    found = fit_statistics(target, SHAPE, Dials(tokens=800, requests=4, seed=7))
    reached = measure(generate(found, SHAPE), SHAPE.num_experts)
    assert reached.concentration == pytest.approx(target.concentration, abs=0.01)
    assert reached.reuse == pytest.approx(target.reuse, abs=0.01)
    assert reached.prediction == pytest.approx(target.prediction, abs=0.03)
    assert reached.near_prediction == pytest.approx(target.near_prediction, abs=0.03)


def test_what_the_target_cannot_tell_stays() -> None:
    target = measure(
        generate(Dials(prompt=0, tokens=100, requests=1), SHAPE, detailed=False), SHAPE.num_experts
    )
    start = Dials(prompt=0, tokens=100, requests=1, similarity=0.31, predictability=0.13)
    found = fit_statistics(target, SHAPE, start)
    assert (found.similarity, found.predictability) == (0.31, 0.13)


def test_hit_rates_are_reached() -> None:
    start = Dials(similarity=1.0, tokens=150, requests=1, prompt=0)
    wanted = hit_rates(replace(start, skew=2.4, locality=0.05), MODEL, ROWS, num_layers=2)
    found = fit_hit_rates(wanted, MODEL, start)
    before, after = (
        misfit(hit_rates(dials, MODEL, wanted, num_layers=2), wanted) for dials in (start, found)
    )
    assert after < 0.02 < before / 3


def test_hit_rates_as_text() -> None:
    assert parse_hit_rates("lru:10=.23,20=0.4") == HitRates("lru", {10: 0.23, 20: 0.4})
    for text in ("lru", "lru:10", "lru:10=a", "lru:a=.5", "lru:10=2", "lru:0=.5", "lru:10=nan"):
        with pytest.raises(BadUsage, match="hit rates"):
            parse_hit_rates(text)
