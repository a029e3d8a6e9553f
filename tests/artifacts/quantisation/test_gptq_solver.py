"""The column loop against a slow, independent implementation of the published algorithm."""

import pytest
import torch

from artifacts.quantisation import gptq
from artifacts.quantisation.gptq import hessian, quantize
from artifacts.quantisation.gptq_solver import Metric, activation_order
from tests.helpers.correlated import correlated, loss, weights

SHAPE = (24, 256)


def reference_grid(group: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero-point [rows, 1] of a group [rows, inputs]."""
    if bits == 1:
        return 2 * group.abs().mean(1, keepdim=True), torch.full((len(group), 1), 0.5).double()
    low = group.min(1, keepdim=True).values.clamp(max=0)
    high = group.max(1, keepdim=True).values.clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    return scale, torch.round(-low / scale)


def reference(
    weight: torch.Tensor, hessian: torch.Tensor, bits: int, group_size: int, damp: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and dequantised weights [out, in]: column by column, every error is added to all later
    columns."""
    work = weight.clone().double()
    hessian = hessian.clone().double()
    dead = torch.diag(hessian) == 0
    hessian[dead, dead] = 1
    work[:, dead] = 0
    hessian += damp * torch.diag(hessian).mean() * torch.eye(len(hessian))
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    codes = torch.zeros_like(work)
    result = torch.zeros_like(work)
    for i in range(work.shape[1]):
        if i % group_size == 0:
            scale, zero = reference_grid(work[:, i : i + group_size], bits)
        column = work[:, i : i + 1]
        if bits == 1:
            code = (column >= 0).double()
        else:
            code = torch.clamp(torch.round(column / scale) + zero, 0, 2**bits - 1)
        codes[:, i : i + 1] = code
        result[:, i : i + 1] = scale * (code - zero)
        error = (column - result[:, i : i + 1]) / upper[i, i]
        work[:, i:] -= error @ upper[i : i + 1, i:]
    return codes, result


@pytest.mark.parametrize("group_size", [32, 128, 256])
@pytest.mark.parametrize("num_samples", [64, 1024])
def test_plain_is_the_published_algorithm(num_samples: int, group_size: int) -> None:
    weight = weights(*SHAPE)
    inputs = correlated(num_samples, SHAPE[1])
    inputs[:, 7] = 0
    metric = hessian(inputs)
    replicas = quantize(weight, metric, [1, 2, 3, 4], group_size, recipe="plain")
    for bits, replica in replicas.items():
        codes, result = reference(weight, metric, bits, group_size, 0.01)
        assert (replica.codes == codes).double().mean() >= 0.995
        assert loss(weight, replica.dequantised(), inputs) == pytest.approx(
            loss(weight, result, inputs), rel=1e-3
        )


def test_single_precision_agrees_with_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "_DOUBLE_INPUTS", 0)
    weight = weights(*SHAPE)
    inputs = correlated(512, SHAPE[1])
    replica = quantize(weight.float(), hessian(inputs).float(), [3], 32, recipe="plain")[3]
    codes, result = reference(weight, hessian(inputs), 3, 32, 0.01)
    assert (replica.codes == codes).double().mean() >= 0.98
    assert loss(weight, replica.dequantised(), inputs) == pytest.approx(
        loss(weight, result, inputs), rel=5e-3
    )


def test_a_metric_is_a_damped_hessian_and_its_factor() -> None:
    inputs = hessian(correlated(20, 32))
    ridge = torch.arange(32).double() + 1
    order = torch.arange(32).flip(0)
    metric = Metric.of(inputs, order, ridge=ridge, dtype=torch.float64)
    assert (
        torch.allclose(metric.root @ metric.root.T, metric.hessian)
        and not metric.root.triu(1).any()
    )
    assert torch.allclose(metric.hessian.flip(0, 1), inputs + ridge.diag())
    for sign in (-1, 0):
        assert (
            Metric.of(sign * torch.eye(32), order, ridge=torch.zeros(32), dtype=torch.float64)
            is None
        )


def test_groups_are_visited_whole_and_by_falling_activation() -> None:
    order = activation_order(torch.tensor([1.0, 5, 3, 0, 9, 2, 4, 4]), 4).tolist()
    assert order[::-1] == [4, 7, 6, 5, 1, 2, 0, 3]
