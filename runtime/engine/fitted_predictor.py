"""Fitted predictors of the next layers' experts, on the device."""

import numpy as np
import torch
from torch.nn.functional import silu

from artifacts.routing.predictors import Predictors, check_reach, projection


class Features:
    """The features [T, H + F + 1] of a router's input x [T, H], in which predictors are linear."""

    def __init__(self, hidden: int, num_features: int, seed: int, device: torch.device) -> None:
        matrix, shift = projection(hidden, num_features, seed)
        self._matrix = torch.from_numpy(matrix).to(device)
        self._shift = torch.from_numpy(shift).to(device)
        self._one = torch.ones(1, 1, device=device)

    def of(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        x = x.flatten(0, -2).float()
        mixed = silu(torch.addmm(self._shift, x, self._matrix, alpha=scale))
        return torch.cat((x, mixed, self._one.expand(len(x), 1)), dim=1)


class Predictor:
    """Predictors of all layers, for the next `distance` layers. Raises Incompatible where they do
    not reach so far."""

    def __init__(self, predictors: Predictors, distance: int, device: torch.device) -> None:
        check_reach(predictors, distance)
        self.distance = distance
        self._features = Features(
            predictors.hidden, predictors.num_features, predictors.seed, device
        )
        self._scale = predictors.scale.tolist()
        # One matrix a layer for all distances: a call costs more than multiplying one token.
        side_by_side = predictors.weights[:, :distance].transpose(0, 2, 1, 3)
        self._weights = torch.from_numpy(np.ascontiguousarray(side_by_side)).flatten(2).to(device)

    def receipt(self) -> dict[str, int]:
        """The distance, and the bytes that the predictors take beside the experts."""
        return {"distance": self.distance, "bytes": self._weights.nbytes}

    def ahead(self, layer: int, x: torch.Tensor) -> list[torch.Tensor]:
        """The predicted distribution [T, E] of each of the next layers."""
        logits = self._features.of(x, self._scale[layer]) @ self._weights[layer]
        return list(logits.unflatten(1, (self.distance, -1)).softmax(-1).unbind(1))
