"""Horizon, slow and in plain numpy: every token is kept, and compared again at every step."""

import numpy as np

from artifacts.shape import Shape
from artifacts.traces.trace import PREFILL
from runtime.policies.base import Now, Step

DISCOUNT = 0.45
LAGS = 4
LATER = 0.85
SHARPNESS = (15.0, 40.0)
PRIOR_TOKENS = 4
LONGEST = 1 / (1 - LATER)
TOKENS = np.array([1.0, 4.0, 16.0, 64.0])[:, None]


class Reference:
    """`tokens[n][l]` [E] bool: what token n used at layer l."""

    def __init__(self, shape: Shape, memory: int) -> None:
        self.shape = shape
        self.memory = memory
        even = shape.top_k / shape.num_experts
        self.tokens: list[np.ndarray] = []
        self.common = np.zeros((shape.num_layers, memory))  # by layer and age
        self.levels = np.full((shape.num_layers, 7, shape.num_experts), even)
        self.known = np.zeros((shape.num_layers, 8, shape.num_experts))
        self.used_keys = np.zeros((shape.num_layers, shape.num_experts))
        self.expected = np.full((shape.num_layers, shape.num_experts), np.inf)
        self.weights = np.array([5, 0, -0.2, -0.8, 0, 0, -2, -1])
        self.moments = np.eye(8) * 20.0
        self.products = 20.0 * self.weights
        self.pass_index = -1
        self.was_decode = False
        self.waits = np.full((shape.num_layers, shape.num_experts), LONGEST)
        self.ahead: list[_Ahead] = []

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        shape = self.shape
        layer = step.layer
        is_prompt = step.phase == PREFILL and len(step.selected) > 1
        if now.pass_index != self.pass_index:
            self._begin_pass(step, now, is_prompt)
        used = np.isin(np.arange(shape.num_experts) + layer * shape.num_experts, keys)
        self.used_keys[layer] = used
        rows = (
            np.stack([np.isin(np.arange(shape.num_experts), row) for row in step.selected])
            if is_prompt
            else [used]
        )
        for token, row in zip(self.tokens[-len(rows) :], rows[-len(self.tokens) :], strict=True):
            token[layer] = row
        share = np.stack(
            [(step.selected == expert).sum() for expert in range(shape.num_experts)]
        ) / len(step.selected)
        share = used if len(step.selected) == 1 else share
        levels = self.levels[layer]
        levels[:5] += self.gains * (share - levels[:5])
        levels[5:] = self._followers(layer, levels[4])
        self.known[layer] = np.append(np.ones((1, shape.num_experts)), np.sqrt(levels), axis=0)
        wait = self.waits[layer] = np.clip(self.weights @ self.known[layer], 1, LONGEST)
        self.expected[layer] = now.step + shape.num_layers * wait
        for ahead in self.ahead:
            ahead.compare(layer, used)
        for distance in range(1, 1 + (0 if step.foreseen is None else step.foreseen.shape[1])):
            self._look_ahead(step, now, distance)

    def _look_ahead(self, step: Step, now: Now, distance: int) -> None:
        """Predict a visit; past the last layer only the last token of each request counts."""
        target = step.layer + distance
        rows = step.foreseen[:, distance - 1].astype(float)
        if target >= self.shape.num_layers and step.last is not None:
            rows = rows[step.last]
        target %= self.shape.num_layers
        if len(self.ahead) < distance:
            self.ahead.append(_Ahead())
        wait = self.waits[target]
        rate = (1 / wait - 1 / LONGEST) / LATER
        chance = self.ahead[distance - 1].chance(target, rows, self.shape.top_k, rate)
        self.expected[target] = now.step + distance + (1 - chance) * self.shape.num_layers * wait

    def _begin_pass(self, step: Step, now: Now, is_prompt: bool) -> None:
        if self.was_decode:
            self._learn()
        for ahead in self.ahead:
            ahead.weights = np.linalg.solve(ahead.moments, ahead.products)
        self.before = self.known.copy()
        self.pass_index = now.pass_index
        self.was_decode = step.phase != PREFILL
        num_tokens = len(step.selected)
        slow = num_tokens / (now.num_tokens + PRIOR_TOKENS)
        self.gains = np.append(
            np.maximum(1 - (1 - 1 / TOKENS) ** num_tokens, slow), [[slow]], axis=0
        )
        empty = np.zeros((self.shape.num_layers, self.shape.num_experts), bool)
        self.tokens += [empty.copy() for _ in range(num_tokens if is_prompt else 1)]
        self.tokens = self.tokens[-self.memory :]
        if is_prompt:
            self.common[:] = 0

    def _learn(self) -> None:
        for before, later, used in zip(self.before, self.known, self.used_keys, strict=True):
            weighed = before / np.clip(self.weights @ before, 1, LONGEST)
            self.moments += weighed @ (before - LATER * (1 - used) * later).T
            self.products += weighed.sum(axis=1)
        self.weights = np.linalg.solve(self.moments, self.products)

    def _followers(self, layer: int, mean: np.ndarray) -> list[np.ndarray]:
        by_age = [token[layer] for token in reversed(self.tokens)]
        self.common[layer] = 0
        self.common[layer, : len(by_age)] = [(token & by_age[0]).sum() for token in by_age]
        alike = self.common.sum(axis=0) + self.common[layer]
        alike[0] = 0
        most = self.shape.top_k * (self.shape.num_layers + 1)
        return [
            self._followed(
                np.exp(-sharp / most * np.minimum(alike.max() - alike, most)), by_age, mean
            )
            for sharp in SHARPNESS
        ]

    def _followed(
        self, weight: np.ndarray, by_age: list[np.ndarray], mean: np.ndarray
    ) -> np.ndarray:
        sums = 0.5 * mean
        total = 0.5
        for age in range(1, self.memory):  # tokens before the first one have followers too
            for lag in range(1, LAGS + 1):
                if 0 <= age - lag < len(by_age):
                    counts = weight[age] * DISCOUNT ** (lag - 1)
                    sums = sums + counts * by_age[age - lag]
                    total = total + counts
        return sums / total


class _Ahead:
    """The features predicted for layers at a distance, `known[layer]` [3, E], until their visits,
    and the regression on them."""

    def __init__(self) -> None:
        self.weights = np.array([0.5, 0.5, 0.0])
        self.moments = np.eye(3) * 20.0
        self.products = 20.0 * self.weights
        self.known: dict[int, np.ndarray] = {}

    def chance(self, layer: int, rows: np.ndarray, top_k: int, rate: np.ndarray) -> np.ndarray:
        is_top = (rows >= np.sort(rows, axis=1)[:, [-top_k]]).any(axis=0)
        likely = 1 - np.prod(1 - np.minimum(top_k * rows, 1), axis=0)
        self.known[layer] = np.stack([is_top, likely, rate])
        return np.clip(self.weights @ self.known[layer], 0, 1)

    def compare(self, layer: int, used: np.ndarray) -> None:
        if layer in self.known:
            known = self.known.pop(layer)
            self.moments += known @ known.T
            self.products += known @ used
