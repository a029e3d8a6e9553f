"""The encoder of trellis codes: distortion near the limits, errors where they cost little, equal
codes everywhere."""

import hashlib

import numpy as np
import pytest

from artifacts.errors import BadInput
from artifacts.quantisation.replica_parts import named
from artifacts.quantisation.trellis.trellis import Trellis, fitting
from artifacts.quantisation.trellis.trellis_encoder import Encoder, rotated

pytestmark = pytest.mark.slow


def integers(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers that are the same wherever numpy's generators are, without a rounded logarithm."""
    return np.random.default_rng(seed).integers(-8, 9, (*shape, 4)).sum(-1) / 10


def moments(num_inputs: int, seed: int = 1) -> np.ndarray:
    inputs = integers(4 * num_inputs, num_inputs, seed=seed) @ integers(
        num_inputs, num_inputs, seed=seed + 1
    )
    return inputs.T @ inputs / len(inputs)


def encoder(weight: np.ndarray, moments: np.ndarray, *, rotates_outputs: bool = True) -> Encoder:
    return Encoder(weight, rotated(moments)[None], rotates_outputs=rotates_outputs, damp=0.01)


def cost(weight: np.ndarray, coded: Trellis, moments: np.ndarray) -> float:
    error = weight - coded.dequantised().double().numpy()
    return float((error @ moments * error).sum() / (weight @ moments * weight).sum())


@pytest.mark.parametrize(("bits", "most"), [(1.02, 0.28), (2.02, 0.0725), (3.02, 0.0205)])
def test_distortion_of_gaussian_weights(bits: float, most: float) -> None:
    weight = np.random.default_rng(3).standard_normal((512, 48))
    coded = encoder(weight, np.eye(48)).at(bits)
    assert cost(weight, coded, np.eye(48)) < most
    assert 8 * coded.nbytes <= bits * weight.size


@pytest.mark.parametrize("rotates_outputs", [True, False])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 48), (40, 33)])
def test_errors_go_where_inputs_are_small(
    num_outputs: int, num_inputs: int, rotates_outputs: bool
) -> None:
    weight = integers(num_outputs, num_inputs)
    seen = moments(num_inputs)
    blind, guided = (
        encoder(weight, each, rotates_outputs=rotates_outputs).at(1.5)
        for each in (np.eye(num_inputs), seen)
    )
    assert cost(weight, guided, seen) < 0.7 * cost(weight, blind, seen)
    assert (guided.row_scales is None) == rotates_outputs


def test_more_bits_cost_less_and_take_no_more_than_asked() -> None:
    weight = integers(64, 96)
    seen = moments(96)
    coder = encoder(weight, seen, rotates_outputs=False)
    costs = []
    for bits in (0.8, 1.5, 2, 4):
        coded = coder.at(bits)
        assert 8 * coded.nbytes <= bits * weight.size
        assert (coded.half_bits, coded.is_high().sum()) == fitting(64, 96, bits, is_rotated=False)
        costs.append(cost(weight, coded, seen))
    assert costs == sorted(costs, reverse=True) and costs[-1] < 0.03 * costs[0]


def test_a_row_follows_its_own_hessian() -> None:
    weight = integers(64, 32)
    groups = np.arange(64) % 2
    both = [moments(32, seed=5), moments(32, seed=9)]
    coded = Encoder(
        weight, np.stack([*map(rotated, both)]), groups, rotates_outputs=False, damp=0.01
    ).at(1.5)
    error = weight - coded.dequantised().double().numpy()
    for group in (0, 1):
        rows = error[groups == group]
        own, other = (
            (rows @ seen * rows).sum() / np.trace(seen) for seen in (both[group], both[1 - group])
        )
        assert own < other


def test_a_row_beyond_all_levels_does_not_spoil_its_column() -> None:
    """Costs are numbers of 16 bits: what all levels have in common is left out."""
    weight = np.random.default_rng(3).standard_normal((512, 16))
    weight[::100] *= 4
    assert cost(weight, encoder(weight, np.eye(16)).at(3.02), np.eye(16)) < 0.2


@pytest.mark.parametrize(
    "weight", [np.zeros((32, 16)), np.eye(32, 16) * 1e-30, np.full((32, 16), 1e12)]
)
def test_weights_of_any_size(weight: np.ndarray) -> None:
    coded = encoder(weight, np.zeros((16, 16))).at(2)
    assert np.isfinite(coded.dequantised().numpy()).all()
    assert np.abs(coded.dequantised().numpy()).max() <= 4 * max(np.abs(weight).max(), 1e-12)


def test_numbers_that_are_not_finite_are_refused() -> None:
    with pytest.raises(BadInput, match="damaged"):
        encoder(np.full((32, 16), np.nan), np.eye(16))


def test_codes_are_the_same_on_every_machine() -> None:
    digest = hashlib.sha256()
    for rotates_outputs in (True, False):
        coder = encoder(integers(64, 48), moments(48), rotates_outputs=rotates_outputs)
        for bits in (0.8, 1.5, 3):
            for name, tensor in named({bits: {"matrix": coder.at(bits)}}):
                digest.update(name.encode() + tensor.numpy().tobytes())
    assert digest.hexdigest()[:16] == "592780fe7ffe07b4"
