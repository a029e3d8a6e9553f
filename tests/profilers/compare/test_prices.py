"""Prices of shortcuts: exact loading costs nothing, what is lost has its error, saves fewer bytes,
and is the same twice."""

import numpy as np
import pytest

from artifacts.errors import BadUsage, Incompatible
from profilers.compare.bench import BenchText
from profilers.compare.prices import (
    EXACT,
    Price,
    Pricing,
    Shortcut,
    front,
    mixtures,
    shortcuts,
)
from profilers.routing.saliency import least_salient, saliency
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.policies.routing.pruned import Pruned
from tests.helpers.families import VOCABULARY

ZERO = Shortcut("zero", "zero", {"miss": "zero"})


@pytest.fixture(scope="module")
def text() -> BenchText:
    return BenchText(tuple(np.random.default_rng(0).integers(3, VOCABULARY, (3, 12))), 4)


@pytest.fixture(scope="module")
def pricing(opened: MoeModel, text: BenchText) -> Pricing:
    return Pricing(opened, Artefacts(), text, budget="50%")


def test_exact_loading_costs_nothing_and_saves_nothing(pricing: Pricing) -> None:
    exact = pricing.price(EXACT)
    assert (exact.loss, exact.loss_error, exact.kl, exact.saved_nbytes) == (0, 0, 0, 0)
    assert exact.price is None and exact.nbytes > 0


def test_what_is_left_out_saves_bytes_and_changes_the_output(pricing: Pricing) -> None:
    zero = pricing.price(ZERO)
    assert 0.9 < zero.saved_share <= 1, "a slot is still empty"
    assert zero.kl > 0 and zero.loss_error > 0
    assert zero.price == pytest.approx(zero.loss / zero.saved_share / 10) and zero.price_error > 0
    assert pricing.price(ZERO) == zero, "to the digit"


def test_what_cannot_be_priced_says_why(
    pricing: Pricing, opened: MoeModel, text: BenchText
) -> None:
    with pytest.raises(Incompatible, match="moectl quantize"):
        pricing.price(Shortcut("4 bits for all", "bits", base=4))
    with pytest.raises(BadUsage, match="lossless"):
        Pricing(opened, Artefacts(), text, name="shadow")
    with pytest.raises(BadUsage, match="more --tokens"):
        Pricing(opened, Artefacts(), BenchText(text.sequences[:1], 4))


def test_the_catalogue_prunes_the_least_salient(opened: MoeModel, text: BenchText) -> None:
    shape = opened.shape
    scores = saliency(opened, text.sequences)
    assert scores.shape == (shape.num_layers, shape.num_experts) and scores.max() > 0
    found = {one.name: one for one in shortcuts(shape, scores, seed=3)}
    half = least_salient(scores, 0.5)
    assert (half.sum(axis=1) == shape.num_experts // 2).all()
    lowest = scores.argmin(axis=1)
    assert half[np.arange(shape.num_layers), lowest].all()
    expected = f"pruned:experts={Pruned.of(half).experts}"
    pruned = [one.policies["routing"] for one in found.values() if one.family == "pruned"]
    assert expected in pruned
    assert found["random_resident"].policies == {"miss": "random_resident:seed=3"}
    assert len({one.family for one in found.values()}) >= 10


def priced(name: str, loss: float, saved: float, **axes: str) -> Price:
    shortcut = Shortcut(name, name, axes)
    return Price(shortcut, loss, 0.1, loss, 1.0, saved, saved, loss / saved / 10, 0.1)


def test_mixtures_are_of_other_axes_and_the_beaten_leave() -> None:
    drop, zero, lean = (
        priced("drop", 0.1, 0.5, miss="drop"),
        priced("zero", 0.4, 0.9, miss="zero"),
        priced("lean", 0.2, 0.6, routing="cache_aware"),
    )
    mixed = mixtures([drop, zero, lean], 8)
    assert [one.name for one in mixed] == ["drop + lean", "lean + zero"]
    assert mixed[0].policies == {"miss": "drop", "routing": "cache_aware"}
    assert mixtures([drop, zero, lean], 1) == mixed[:1]
    beaten = priced("beaten", 0.3, 0.55)
    assert front([zero, beaten, lean, drop]) == [drop, lean, zero]
