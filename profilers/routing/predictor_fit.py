"""Fits by ridge regression what routers say layers ahead, chooses between two targets and tests the
result.

Only sums of products are kept of the text: float32 within a batch and float64 over batches.

Shapes: T tokens, L layers, D distances, E experts, H hidden, A features.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from artifacts.routing.predictors import TARGETS
from artifacts.shape import Shape
from runtime.engine.fitted_predictor import Features

_RIDGE = 1e-4  # as a share of the mean square of a feature
# multiply a fit's outputs; tried on text that the fit has not seen
_FACTORS = 2.0 ** np.arange(-2, 5.5, 0.5)


@dataclass(frozen=True, slots=True)
class RouterBatch:
    """Inputs and logits of every layer's router on T tokens, and what the routers ahead predict
    from the same inputs.

    `following` are the rows of tokens that have a successor; it is in the next row.
    """

    inputs: list[torch.Tensor]  # L of [T, H]
    logits: list[torch.Tensor]  # L of [T, E]
    predicted: list[torch.Tensor]  # L of [T, D, E]
    following: torch.Tensor

    def ahead(self, layer: int, distance: int) -> tuple[slice | torch.Tensor, torch.Tensor]:
        """Return the rows that have a target `distance` layers ahead, and the target's logits."""
        target = layer + distance
        if target < len(self.logits):
            return slice(None), self.logits[target]
        return self.following, self.logits[target - len(self.logits)][self.following + 1]


def selected(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """[T, E]: 1 where an expert is among the `top_k` of largest logit, else 0."""
    return torch.zeros_like(logits).scatter_(1, logits.topk(top_k, dim=1).indices, 1)


class RidgeFit:
    """Fits two targets on the same features: the logits ahead, and whether an expert is selected.

    `scale` [L] normalises each layer's inputs; `use` [L, E] counts the tokens that selected each
    expert.
    """

    def __init__(self, shape: Shape, *, distance: int, num_features: int, seed: int) -> None:
        self.shape = shape
        self.distance = distance
        self.scale = np.zeros(shape.num_layers, np.float32)
        self.use = np.zeros((shape.num_layers, shape.num_experts))
        self.num_samples = 0
        self._num_features = num_features
        self._seed = seed
        self._features: Features | None = None
        self._moments: dict[
            tuple[int, bool], torch.Tensor
        ] = {}  # by layer, and whether its target is in the next pass
        self._products: dict[tuple[int, int], torch.Tensor] = {}  # by layer and distance

    def add(self, batch: RouterBatch) -> None:
        """Add the batch's products to the sums."""
        if self._features is None:
            self._begin(batch)
        self.num_samples += len(batch.inputs[0])
        for layer in range(self.shape.num_layers):
            self.use[layer] += selected(batch.logits[layer], self.shape.top_k).sum(0).cpu().numpy()
            self._add_layer(batch, layer)

    def _add_layer(self, batch: RouterBatch, layer: int) -> None:
        features = self.features(batch, layer)
        counted = set()
        for distance in range(1, self.distance + 1):
            rows, logits = batch.ahead(layer, distance)
            x = features[rows]
            moment = (layer, self._wraps(layer, distance))
            if moment not in counted:
                counted.add(moment)
                _add(self._moments, moment, x.T @ x)
            targets = torch.cat((logits, selected(logits, self.shape.top_k)), dim=1)
            _add(self._products, (layer, distance), x.T @ targets)

    def features(self, batch: RouterBatch, layer: int) -> torch.Tensor:
        """Return the features [T, A] of a layer's inputs."""
        return self._features.of(batch.inputs[layer], float(self.scale[layer]))

    def solve(self) -> dict[str, np.ndarray]:
        """Return the weights [L, D, A, E] of each target."""
        solved = []
        for (layer, distance), products in self._products.items():
            moments = self._moments[layer, self._wraps(layer, distance)]
            ridge = _RIDGE * moments.diagonal().mean() * torch.eye(len(moments)).to(moments)
            solved.append(torch.linalg.solve(moments + ridge, products).float().cpu().numpy())
        weights = np.stack(solved).reshape(self.shape.num_layers, self.distance, *solved[0].shape)
        return dict(zip(TARGETS, np.split(weights, len(TARGETS), axis=3), strict=True))

    def _wraps(self, layer: int, distance: int) -> bool:
        """Return whether the target is in the next token's pass."""
        return layer + distance >= self.shape.num_layers

    def _begin(self, batch: RouterBatch) -> None:
        """Set the scale of the inputs from the first batch."""
        mean_squares = [float(x.double().square().mean()) for x in batch.inputs]
        self.scale[:] = 1 / np.sqrt(np.maximum(mean_squares, 1e-12))
        hidden = batch.inputs[0].shape[1]
        device = batch.inputs[0].device
        self._features = Features(hidden, self._num_features, self._seed, device)


def _add(sums: dict, key: tuple, product: torch.Tensor) -> None:
    if key in sums:
        sums[key] += product
    else:
        sums[key] = product.double()


class Recall:
    """Measures the share of the k selected experts that are among the k predicted, by layer and
    distance."""

    def __init__(self, shape: Shape, distance: int) -> None:
        self._top_k = shape.top_k
        self._hits = np.zeros((shape.num_layers, distance))
        self._tokens = np.zeros_like(self._hits)

    def add(self, place: tuple[int, int], scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Add tokens of a layer and distance: predicted `scores` [T, E] or [1, E], and the router's
        `logits` [T, E]."""
        hits = selected(scores, self._top_k) * selected(logits, self._top_k)
        self._hits[place] += float(hits.sum()) / self._top_k
        self._tokens[place] += len(logits)

    def mean(self) -> np.ndarray:
        """[L, D]."""
        return self._hits / np.maximum(self._tokens, 1)


class TargetTuning:
    """Measures one target's weights on text that the fit has not seen: recall, and cross-entropy by
    output factor."""

    def __init__(self, shape: Shape, distance: int) -> None:
        self.recall = Recall(shape, distance)
        self.losses = np.zeros((shape.num_layers, distance, len(_FACTORS)))

    def add(self, batch: RouterBatch, fit: RidgeFit, weights: np.ndarray) -> None:
        for place, scores, logits in _predictions(batch, fit, weights):
            self.recall.add(place, scores, logits)
            p = logits.softmax(-1)
            self.losses[place] += [
                float(-(p * (scores * f).log_softmax(-1)).sum()) for f in _FACTORS.tolist()
            ]


def _predictions(
    batch: RouterBatch, fit: RidgeFit, weights: np.ndarray
) -> Iterator[tuple[tuple[int, int], torch.Tensor, torch.Tensor]]:
    """Yield by layer and distance the scores [T, E] that the weights give, and the target's logits
    [T, E]."""
    for layer in range(fit.shape.num_layers):
        features = fit.features(batch, layer)
        for ahead in range(fit.distance):
            rows, logits = batch.ahead(layer, ahead + 1)
            yield (
                (layer, ahead),
                features[rows] @ torch.from_numpy(weights[layer, ahead]).to(features),
                logits,
            )


def tuned_weights(fit: RidgeFit, batches: Iterable[RouterBatch]) -> tuple[np.ndarray, np.ndarray]:
    """Solve the fit and choose between its targets on `batches`, which it has not seen. Returns as
    `choose`."""
    candidates = fit.solve()
    tuned = {target: TargetTuning(fit.shape, fit.distance) for target in candidates}
    for batch in batches:
        for target, weights in candidates.items():
            tuned[target].add(batch, fit, weights)
    return choose(candidates, tuned)


def choose(
    candidates: dict[str, np.ndarray], tuned: dict[str, TargetTuning]
) -> tuple[np.ndarray, np.ndarray]:
    """Choose for each layer and distance the target of better recall, and multiply its weights by
    the factor of least cross-entropy. Returns weights [L, D, A, E] and targets [L, D]."""
    recalls = np.stack([tuned[target].recall.mean() for target in TARGETS])
    best = recalls.argmax(axis=0)
    weights = np.empty_like(candidates[TARGETS[0]])
    for place in np.ndindex(best.shape):
        target = TARGETS[best[place]]
        weights[place] = candidates[target][place] * _FACTORS[tuned[target].losses[place].argmin()]
    return weights, np.array(TARGETS)[best]


class PredictorTest:
    """Measures recall on the test text: of the chosen weights, and of the controls that they are
    compared with."""

    def __init__(self, fit: RidgeFit) -> None:
        self._fit = fit
        self._learned, self._next_gate, self._frequent = (
            Recall(fit.shape, fit.distance) for _ in range(3)
        )
        self.num_tokens = 0

    def add(self, batch: RouterBatch, weights: np.ndarray) -> None:
        use = self._fit.use
        self.num_tokens += len(batch.inputs[0])
        for (layer, ahead), scores, logits in _predictions(batch, self._fit, weights):
            rows, _ = batch.ahead(layer, ahead + 1)
            frequent = torch.from_numpy(use[(layer + ahead + 1) % len(use)])
            self._learned.add((layer, ahead), scores, logits)
            self._next_gate.add((layer, ahead), batch.predicted[layer][rows, ahead], logits)
            self._frequent.add((layer, ahead), frequent[None].to(scores), logits)

    def recalls(self) -> dict[str, np.ndarray]:
        """[L, D] each: the fitted weights, the routers ahead on this layer's input, the experts
        most frequent in the text of the fit, and a random choice."""
        shape = self._fit.shape
        learned = self._learned.mean()
        return {
            "learned": learned,
            "next_gate": self._next_gate.mean(),
            "most frequent": self._frequent.mean(),
            "random": np.full(learned.shape, shape.top_k / shape.num_experts),
        }
