"""Weights, and correlated inputs like those of trained layers."""

import torch


def correlated(
    num_samples: int, num_inputs: int, *, seed: int = 0, outliers: int = 2
) -> torch.Tensor:
    """Inputs with a falling spectrum and a few channels that are much larger than the others."""
    random = torch.Generator().manual_seed(seed)
    spectrum = torch.arange(1, num_inputs + 1).double().pow(-0.7)
    mixed = torch.randn(num_inputs, num_inputs, generator=random).double() * spectrum[:, None]
    inputs = torch.randn(num_samples, num_inputs, generator=random).double() @ mixed
    inputs[:, :outliers] *= 8
    return inputs


def weights(num_outputs: int, num_inputs: int, *, seed: int = 0) -> torch.Tensor:
    return (
        torch.randn(
            num_outputs, num_inputs, generator=torch.Generator().manual_seed(seed + 1)
        ).double()
        * 0.02
    )


def loss(weight: torch.Tensor, replica: torch.Tensor, inputs: torch.Tensor) -> float:
    return float(((weight.double() - replica.double()) @ inputs.T.double()).square().mean())
