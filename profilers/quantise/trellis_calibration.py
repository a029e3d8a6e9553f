"""Calibrates one expert for trellis codes, and codes its projections at several widths.

Errors of the first projection weigh as they change the expert's output: they are weighted by the
squared derivative of the activation with respect to each row, the norm of the column of the second
projection that it meets, and the squared routing weight. So a row has a Hessian of its own where
that fits. The second projection is fitted, for each width, to the outputs of the expert without
loss, on the activations that the coded first projection gives.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from artifacts.quantisation.gptq import gram
from artifacts.quantisation.trellis.rotation import rotate
from artifacts.quantisation.trellis.trellis import Trellis
from artifacts.quantisation.trellis.trellis_encoder import Encoder, rotated
from artifacts.quantisation.widths import Width
from profilers.quantise.calibration import (
    LayerInputs,
    Weights,
    activations,
    moments_dtype,
    oriented,
    spaced,
)
from profilers.quantise.method import DOWN, Method, first_projection
from runtime.model.arithmetic import project

OWN_TOKENS = 8192  # of an expert, at most, that its projections are fitted to
_GUIDING_TOKENS = 1024  # on which rows' own Hessians are taken
_OWN_SHARE = 0.95  # of a row's Hessian, at most, that is its own
_GROUPED_SIZE = 2**23  # numbers in the Hessians of all groups of rows

_MANY_GROUPS = 32  # from which on moments are sums of products of inputs
# inputs and tokens whose products are taken at once
_BLOCK = 16
_CHUNK = 256

Coded = dict[Width, Trellis]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Inputs x [n, in] of an expert and the weight of each; the last ones are of its layer's
    sample, which weighs as much as a token for each input of a projection."""

    x: torch.Tensor
    own: torch.Tensor
    sampled: int

    @classmethod
    def of(
        cls, inputs: LayerInputs, rows: np.ndarray, gates: np.ndarray, device: torch.device
    ) -> "Tokens":
        """The expert's tokens, weighted by the squares of its gates with a mean of 1."""
        chosen = spaced(len(rows), OWN_TOKENS)
        sample = inputs.sample()
        x = torch.cat(list(inputs.read(np.concatenate([rows[chosen], sample]), device)))
        squares = np.square(gates[chosen])
        own = (
            squares / (squares.mean() or 1.0) * (len(rows) / max(1, len(chosen)))
            if len(rows)
            else squares
        )
        return cls(x, torch.from_numpy(own).to(device), len(sample))

    def weights(self, num_inputs: int) -> torch.Tensor:
        """Return float64 [n] with a sum of 1, for a projection of `num_inputs` inputs."""
        sampled = torch.full(
            (self.sampled,), num_inputs / self.sampled, dtype=torch.float64, device=self.own.device
        )
        weights = torch.cat([self.own, sampled])
        return weights / weights.sum()


def code_expert(
    module: nn.Module, weights: Weights, inputs: LayerInputs, tokens: Tokens, method: Method
) -> dict[str, Coded]:
    """Return the trellis codes of an expert's projections by name and width."""
    first = first_projection(module)
    down = oriented(module, weights[DOWN])
    with torch.inference_mode(mode=False):
        groups, sensitivity = _sensitivity(module, weights, tokens)
    hessians = _hessians(inputs, tokens, sensitivity)
    encoder = Encoder(
        _array(oriented(module, weights[first])),
        hessians,
        groups,
        rotates_outputs=False,
        damp=method.damp,
    )
    gates = {width: encoder.at(width) for width in method.bits}
    exact = activations(module, weights, tokens.x)
    downs = {}
    for width, coded in gates.items():
        matrix = coded.dequantised().to(down.device)
        seen = activations(
            module, weights | {first: matrix.T if module.is_transposed else matrix}, tokens.x
        )
        downs[width] = _fitted(down, seen, exact, tokens.weights(seen.shape[1]), method.damp).at(
            width
        )
    return {first: gates, DOWN: downs}


def _fitted(
    down: torch.Tensor, seen: torch.Tensor, exact: torch.Tensor, weights: torch.Tensor, damp: float
) -> Encoder:
    """Return the encoder of the second projection whose outputs on the activations `seen` [n, I]
    come nearest to the original's outputs on `exact` [n, I], the activations of the expert without
    loss."""
    weighted = (seen * weights.to(seen)[:, None]).T
    moments, shared = (
        (weighted @ other).to(moments_dtype(len(weighted))) for other in (seen, exact)
    )
    ridge = damp * moments.diagonal().mean()
    original = down.T.to(moments)
    wanted = (shared @ original).add_(original, alpha=float(ridge))
    aim = (
        torch.linalg.solve(moments + ridge * torch.eye(len(moments)).to(moments), wanted).T
        if ridge > 0
        else down
    )
    return Encoder(_array(aim), rotated(_array(moments))[None], rotates_outputs=True, damp=damp)


def _sensitivity(
    module: nn.Module, weights: Weights, tokens: Tokens
) -> tuple[np.ndarray, torch.Tensor]:
    """The group of each row of the first projection, int [out], and how much a change in a group
    weighs at a token, float32 [n, G]: the mean over its rows."""
    y = (
        project(module, weights, first_projection(module), tokens.x.clone())
        .detach()
        .requires_grad_()
    )
    hidden = module._apply_gate(y) if module.has_gate else module.act_fn(y)
    norms = oriented(module, weights[DOWN]).clone().square().sum(0).sqrt()
    (slopes,) = torch.autograd.grad((hidden * norms).sum(), y)
    num_groups = int(np.clip(_GROUPED_SIZE // tokens.x.shape[1] ** 2, 1, y.shape[1]))
    groups = np.arange(y.shape[1]) * num_groups // y.shape[1]
    sums = torch.zeros(len(y), num_groups, device=y.device)
    sums.index_add_(1, torch.from_numpy(groups).to(y.device), slopes.square())
    return groups, sums / torch.from_numpy(np.bincount(groups)).to(sums)


def _hessians(inputs: LayerInputs, tokens: Tokens, sensitivity: torch.Tensor) -> np.ndarray:
    """Return [G, in, in] of rotated inputs: for each group, its own moments and the moments of all
    tokens."""
    weights = tokens.weights(tokens.x.shape[1])
    num_inputs = tokens.x.shape[1]
    own = tokens.x[: len(tokens.own)] * tokens.own.sqrt()[:, None].to(tokens.x)
    moments = gram(own.to(moments_dtype(num_inputs))) + num_inputs * inputs.mean_moments().to(
        own.device
    )
    mean = torch.from_numpy(rotated(_array(moments / (float(tokens.own.sum()) + num_inputs)))).to(
        own.device
    )
    importance = weights.to(sensitivity) @ sensitivity
    chosen = torch.from_numpy(spaced(len(tokens.x), _GUIDING_TOKENS)).to(own.device)
    x = tokens.x[chosen]
    guide = (sensitivity * weights.to(sensitivity)[:, None])[chosen]
    x = torch.from_numpy(rotate(_array(x))).to(own.device)
    guide *= importance / guide.sum(0).clamp_min(torch.finfo(guide.dtype).tiny)
    share = _OWN_SHARE * len(x) / (len(x) + num_inputs)
    hessians = importance[:, None, None] * ((1 - share) * mean)
    _add_moments(hessians, x, share * guide)
    return _array(hessians)


def _add_moments(hessians: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> None:
    """Add the moments of x [n, in], weighted for each group by `weights` [n, G], to `hessians`
    [G, in, in]. For many groups they come from products of inputs: half of these are computed, the
    others mirrored."""
    num_groups, size = hessians.shape[:2]
    for group in range(num_groups if num_groups < _MANY_GROUPS else 0):
        hessians[group] += (x * weights[:, group, None]).T @ x
    for first in range(0, size if num_groups >= _MANY_GROUPS else 0, _BLOCK):
        end = min(first + _BLOCK, size)
        moments = torch.zeros(num_groups, (end - first) * (size - first), device=x.device)
        for part, of_part in zip(x.split(_CHUNK), weights.split(_CHUNK), strict=True):
            products = part[:, first:end, None] * part[:, None, first:]
            moments.addmm_(of_part.T, products.flatten(1))
        moments = moments.view(num_groups, end - first, -1)
        hessians[:, first:end, first:] += moments
        hessians[:, end:, first:end] += moments[:, :, end - first :].transpose(1, 2)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
