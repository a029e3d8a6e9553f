"""Ridge regression of what routers say layers ahead, choosing between two targets, and testing what came of it.

Only sums of products are kept of the text, of float32 products within a batch and of float64 over batches.

Shapes: T tokens, L layers, D distances, E experts, H hidden, A features.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from artifacts.routing.predictors import TARGETS
from artifacts.shape import Shape
from runtime.engine.predictors import Features

_RIDGE = 1e-4  # of the mean square of a feature
_FACTORS = 2.0 ** np.arange(-2, 5.5, 0.5)  # on a fit's outputs, tried on text that it did not see


@dataclass(frozen=True, slots=True)
class Seen:
    """Of T tokens and every layer the router's input and what it said, and what the routers ahead said of it;
    `following` are tokens that have a successor, in the next row."""

    inputs: list[torch.Tensor]  # L of [T, H]
    logits: list[torch.Tensor]  # L of [T, E]
    predicted: list[torch.Tensor]  # L of [T, D, E]
    following: torch.Tensor

    def ahead(self, layer: int, distance: int) -> tuple[slice | torch.Tensor, torch.Tensor]:
        """Rows of a layer that have a target `distance` layers ahead, and its logits."""
        target = layer + distance
        if target < len(self.logits):
            return slice(None), self.logits[target]
        return self.following, self.logits[target - len(self.logits)][self.following + 1]


def selected(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """[T, E] 1 where an expert is among the `top_k` of largest logit."""
    return torch.zeros_like(logits).scatter_(1, logits.topk(top_k, dim=1).indices, 1)


class Fit:
    """Of two targets on the same features: the logits ahead, and whether an expert is selected. `use` [L, E]: tokens
    that selected each expert."""

    def __init__(self, shape: Shape, *, distance: int, num_features: int, seed: int) -> None:
        self.shape, self.distance = shape, distance
        self.scale = np.zeros(shape.num_layers, np.float32)
        self.use = np.zeros((shape.num_layers, shape.num_experts))
        self.num_samples = 0
        self._num_features, self._seed = num_features, seed
        self._features: Features | None = None
        self._moments: dict[tuple[int, bool], torch.Tensor] = {}  # by layer, and whether its target is in the next pass
        self._products: dict[tuple[int, int], torch.Tensor] = {}  # by layer and distance

    def add(self, seen: Seen) -> None:
        if self._features is None:
            self._begin(seen)
        top_k = self.shape.top_k
        self.num_samples += len(seen.inputs[0])
        for layer in range(self.shape.num_layers):
            self.use[layer] += selected(seen.logits[layer], top_k).sum(0).cpu().numpy()
            features, counted = self.features(seen, layer), set()
            for distance in range(1, self.distance + 1):
                rows, logits = seen.ahead(layer, distance)
                own, at = features[rows], (layer, self._wraps(layer, distance))
                if at not in counted:
                    counted.add(at)
                    _add(self._moments, at, own.T @ own)
                _add(self._products, (layer, distance), own.T @ torch.cat((logits, selected(logits, top_k)), dim=1))

    def features(self, seen: Seen, layer: int) -> torch.Tensor:
        """[T, A] of a layer's inputs."""
        return self._features.of(seen.inputs[layer], float(self.scale[layer]))

    def solve(self) -> dict[str, np.ndarray]:
        """Weights [L, D, A, E] of each target."""
        solved = []
        for (layer, distance), products in self._products.items():
            moments = self._moments[layer, self._wraps(layer, distance)]
            ridge = _RIDGE * moments.diagonal().mean() * torch.eye(len(moments)).to(moments)
            solved.append(torch.linalg.solve(moments + ridge, products).float().cpu().numpy())
        weights = np.stack(solved).reshape(self.shape.num_layers, self.distance, *solved[0].shape)
        return dict(zip(TARGETS, np.split(weights, len(TARGETS), axis=3), strict=True))

    def _wraps(self, layer: int, distance: int) -> bool:
        return layer + distance >= self.shape.num_layers

    def _begin(self, seen: Seen) -> None:
        """The first batch tells how large inputs are."""
        mean_squares = [float(x.double().square().mean()) for x in seen.inputs]
        self.scale[:] = 1 / np.sqrt(np.maximum(mean_squares, 1e-12))
        hidden, device = seen.inputs[0].shape[1], seen.inputs[0].device
        self._features = Features(hidden, self._num_features, self._seed, device)


def _add(sums: dict, at: tuple, product: torch.Tensor) -> None:
    if at in sums:
        sums[at] += product
    else:
        sums[at] = product.double()


class Recall:
    """Of the k experts selected, the share among the k named, by layer and distance."""

    def __init__(self, shape: Shape, distance: int) -> None:
        self._top_k = shape.top_k
        self._hits = np.zeros((shape.num_layers, distance))
        self._tokens = np.zeros_like(self._hits)

    def add(self, at: tuple[int, int], named: torch.Tensor, wanted: torch.Tensor) -> None:
        """`named` [T, E] or [1, E] scores, `wanted` [T, E] logits."""
        chosen = selected(named, self._top_k) * selected(wanted, self._top_k)
        self._hits[at] += float(chosen.sum()) / self._top_k
        self._tokens[at] += len(wanted)

    def mean(self) -> np.ndarray:
        return self._hits / np.maximum(self._tokens, 1)


class Tuning:
    """Recall of a fit on text that it did not see, and its cross-entropy by the factor on its outputs."""

    def __init__(self, shape: Shape, distance: int) -> None:
        self.recall = Recall(shape, distance)
        self.losses = np.zeros((shape.num_layers, distance, len(_FACTORS)))

    def add(self, seen: Seen, fit: Fit, weights: np.ndarray) -> None:
        for at, said, logits in _said(seen, fit, weights):
            self.recall.add(at, said, logits)
            p = logits.softmax(-1)
            self.losses[at] += [float(-(p * (said * f).log_softmax(-1)).sum()) for f in _FACTORS.tolist()]


def _said(seen: Seen, fit: Fit, weights: np.ndarray) -> Iterator[tuple[tuple[int, int], torch.Tensor, torch.Tensor]]:
    """By layer and distance what the weights say [T, E], and the logits that came."""
    for layer in range(fit.shape.num_layers):
        features = fit.features(seen, layer)
        for ahead in range(fit.distance):
            rows, logits = seen.ahead(layer, ahead + 1)
            yield (layer, ahead), features[rows] @ torch.from_numpy(weights[layer, ahead]).to(features), logits


def choose(candidates: dict[str, np.ndarray], tuned: dict[str, Tuning]) -> tuple[np.ndarray, np.ndarray]:
    """For each layer and distance the target of better recall, its outputs times the factor that makes the likeliest
    probabilities of them: weights [L, D, A, E] and targets [L, D]."""
    recalls = np.stack([tuned[target].recall.mean() for target in TARGETS])
    best = recalls.argmax(axis=0)
    weights = np.empty_like(candidates[TARGETS[0]])
    for at in np.ndindex(best.shape):
        target = TARGETS[best[at]]
        weights[at] = candidates[target][at] * _FACTORS[tuned[target].losses[at].argmin()]
    return weights, np.array(TARGETS)[best]


class Tested:
    """Recall of the chosen fit, of the routers ahead asked about this input, and of the most frequent experts."""

    def __init__(self, shape: Shape, distance: int, use: np.ndarray) -> None:
        self._recalls = [Recall(shape, distance) for _ in range(3)]
        self._use = use
        self.num_tokens = 0

    def add(self, seen: Seen, fit: Fit, weights: np.ndarray) -> None:
        self.num_tokens += len(seen.inputs[0])
        fitted, gates, frequent = self._recalls
        for (layer, ahead), said, logits in _said(seen, fit, weights):
            rows, _ = seen.ahead(layer, ahead + 1)
            use = torch.from_numpy(self._use[(layer + ahead + 1) % len(self._use)])
            fitted.add((layer, ahead), said, logits)
            gates.add((layer, ahead), seen.predicted[layer][rows, ahead], logits)
            frequent.add((layer, ahead), use[None].to(said), logits)

    def recalls(self) -> list[np.ndarray]:
        """[L, D] each: fitted, next_gate, frequent."""
        return [recall.mean() for recall in self._recalls]
