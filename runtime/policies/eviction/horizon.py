"""Horizon: evict the key whose next use is expected last; how often each key comes is learned while the run goes on."""

from dataclasses import dataclass

import numpy as np

from artifacts.shape import Shape
from artifacts.trace import PREFILL
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step

_DISCOUNT = 0.45  # weight of the pass after next against the next: a cache looks a little beyond the next pass
_LAGS = (_DISCOUNT ** np.arange(4, dtype=np.float32))[::-1, None]  # what follows after 4, 3, 2, 1 tokens
_TOKENS = np.array([[1.0], [4.0], [16.0], [64.0]])  # time constants of the running frequencies
_PRIOR_TOKENS = 4  # how many tokens of even use the slow mean starts from
_RIDGE = 20.0  # observations that the first guess of the regression is worth
_MEMORY = 1024  # tokens remembered
_SHARPNESS = 15.0  # a past token with nothing in common weighs exp(-15) of one that agrees everywhere
_LEAST_RATE = 1e-3


@dataclass
class Horizon(SimpleEviction):
    """The largest `now + L / p` goes first: p is the rate, per pass, at which a key is expected to be used from now on.

    p is linear in what is known of a key when its layer has run: its running frequencies over about 1, 4, 16 and 64
    tokens, its mean over the whole run, and what followed the past tokens most like this one (`_Recall`). The weights
    are shared by all keys and fitted online by weighted least squares. Where a step carries predictions for the layers
    ahead, the chance q of use at that very visit is fitted too, and the expected time becomes `visit + (1 - q) L / p`.
    """

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape
        num_layers, num_experts, even = shape.num_layers, shape.num_experts, shape.top_k / shape.num_experts
        self._recall = _Recall(shape)
        self._known = np.full((num_layers, len(_TOKENS) + 2, num_experts), even)  # [L, F, E]
        self._before = self._known.copy()
        self._used = np.zeros((num_layers, num_experts))
        self._rate = np.full((num_layers, num_experts), even)
        self._farness = np.full(shape.num_keys, float("inf"))  # step of the expected next use
        self._next_rates = _Regression(np.array([0, 0, 0.3, 0, 0.2, 0.5]))
        self._ahead: dict[int, _Ahead] = {}
        self._num_tokens = self._pass_index = 0

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        if now.pass_index != self._pass_index or not self._num_tokens:
            self._begin_pass(step, now)
        layer = step.layer
        first = layer * self._shape.num_experts
        experts = [key - first for key in keys]
        used, known = self._used[layer], self._known[layer]
        used[:] = 0
        used[experts] = 1
        for ahead in self._ahead.values():
            ahead.learn(layer, used)
        frequencies = known[:-1]
        frequencies += self._gains * (self._share(step, used) - frequencies)
        known[-1] = self._recall.followers(layer, self._rows(step, experts), frequencies[-1])
        self._rate[layer] = rate = np.minimum(np.maximum(self._next_rates.weights @ known, _LEAST_RATE), 1)
        self._expect(layer, now.step + self._shape.num_layers / rate)
        if step.predicted is not None:
            self._look_ahead(step, now)

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        return (-self._farness[keys],)

    def _expect(self, layer: int, when: np.ndarray) -> None:
        first = layer * self._shape.num_experts
        # Whole steps: what differs by rounding alone is a tie.
        self._farness[first : first + self._shape.num_experts] = np.rint(when)

    def _rows(self, step: Step, experts: list[int]) -> np.ndarray | list[int]:
        """What is remembered of a step: a prompt's tokens one by one, the tokens of several requests as one."""
        return step.selected if step.phase == PREFILL and len(step.selected) > 1 else experts

    def _share(self, step: Step, used: np.ndarray) -> np.ndarray:
        """[E] share of the step's tokens that used each expert."""
        if self._is_single:
            return used
        kept = step.selected[step.selected >= 0]
        return np.bincount(kept, minlength=self._shape.num_experts) / len(step.selected)

    # Once a pass

    def _begin_pass(self, step: Step, now: Now) -> None:
        if self._num_tokens and self._is_decode:
            self._next_rates.learn(self._before, self._known, self._used)
        for ahead in self._ahead.values():
            ahead.regression.solve()
        self._before[:] = self._known
        num_tokens = len(step.selected)
        self._is_decode, self._is_single = step.phase != PREFILL, num_tokens == 1
        self._num_tokens += num_tokens
        self._pass_index = now.pass_index
        slow = num_tokens / (self._num_tokens + _PRIOR_TOKENS)
        self._gains = np.append(np.maximum(1 - (1 - 1 / _TOKENS) ** num_tokens, slow), [[slow]], axis=0)
        self._recall.begin_pass(1 if self._is_decode else num_tokens)

    # Predictions

    def _look_ahead(self, step: Step, now: Now) -> None:
        """Sharpen the next visit of the layers that the step predicts."""
        shape = self._shape
        for distance in range(1, step.predicted.shape[1] + 1):
            target = step.layer + distance
            rows = step.predicted[:, distance - 1]
            if target >= shape.num_layers and step.last is not None:
                rows = rows[step.last]
            target %= shape.num_layers
            ahead = self._ahead.setdefault(distance, _Ahead(shape))
            chance = ahead.predict(target, rows, self._rate[target])
            self._expect(target, now.step + distance + (1 - chance) * shape.num_layers / self._rate[target])


class _Regression:
    """Least squares, a row at a time, each weighed by the inverse of its target's variance; `weights` [F] is the
    answer, from a first guess on."""

    def __init__(self, guess: np.ndarray) -> None:
        self.weights = guess
        self._moments = np.eye(len(guess)) * _RIDGE
        self._products = self._moments @ guess

    def learn(self, known: np.ndarray, later: np.ndarray, used: np.ndarray) -> None:
        """The discounted rate of use after `known` [L, F, E] is this pass's use [L, E], then that after `later`
        (least-squares temporal differences, Bradtke and Barto 1996)."""
        rate = np.clip(np.einsum("f,lfe->le", self.weights, known), 0, 1)
        weighed = known * (1 / (rate + 0.02))[:, None]
        self._moments += (weighed @ (known - _DISCOUNT * later).transpose(0, 2, 1)).sum(axis=0)
        self._products += (1 - _DISCOUNT) * np.einsum("lfe,le->f", weighed, used)
        self.solve()

    def add(self, known: np.ndarray, used: np.ndarray) -> None:
        """`known` [F, E] came with `used` [E]."""
        self._moments += known @ known.T
        self._products += known @ used

    def solve(self) -> None:
        self.weights = np.linalg.solve(self._moments, self._products)


class _Ahead:
    """The chance of use at a layer's next visit, given what a router some layers before said and the learned rate."""

    def __init__(self, shape: Shape) -> None:
        self.regression = _Regression(np.array([0.5, 0.5, 0.0]))
        self._top_k = shape.top_k
        self._pending: dict[int, np.ndarray] = {}

    def predict(self, layer: int, predicted: np.ndarray, rate: np.ndarray) -> np.ndarray:
        """[E] from `predicted` [T, E]."""
        top = np.partition(predicted, -self._top_k, axis=1)[:, -self._top_k, None]
        is_top = (predicted >= top).any(axis=0)
        likely = 1 - np.prod(1 - np.minimum(predicted * self._top_k, 1), axis=0)
        self._pending[layer] = known = np.stack([is_top, likely, rate])
        return np.clip(self.regression.weights @ known, 0, 1)

    def learn(self, layer: int, used: np.ndarray) -> None:
        if layer in self._pending:
            self.regression.add(self._pending.pop(layer), used)


class _Recall:
    """Tokens remembered, and what followed those most like the present one.

    Alike: how many experts two tokens have in common over the last L layers, this layer counted twice. The last
    `_MEMORY` tokens are rows of a ring; the row of a token holds its experts as bits, and per layer which experts the
    tokens after it used, discounted.
    """

    def __init__(self, shape: Shape) -> None:
        self._num_experts = shape.num_experts
        num_words = -(-shape.num_experts // 64)
        self._experts = np.zeros((shape.num_layers, num_words, _MEMORY), np.uint64)
        # [L, N, E + 1]; the last column is what the tokens that followed weigh together
        self._followers = np.zeros((shape.num_layers, _MEMORY, shape.num_experts + 1), np.float32)
        # in common over the last L layers, by row: `_common[l]` the part of layer l
        self._common = np.zeros((shape.num_layers, _MEMORY), np.int16)
        self._in_common = np.zeros(_MEMORY, np.int16)
        most = shape.top_k * (shape.num_layers + 1)
        self._weight = np.exp(-_SHARPNESS / most * np.arange(most + 1)).astype(np.float32)
        self._rows = np.zeros(1, np.int64)

    def begin_pass(self, num_rows: int) -> None:
        """The next steps add so many tokens; what was alike a token ago is now so one row further on."""
        self._rows = (self._rows[-1] + 1 + np.arange(min(num_rows, _MEMORY))) % _MEMORY
        self._last = int(self._rows[-1])
        if num_rows > 1:
            self._common[:], self._in_common[:] = 0, 0
        else:
            self._common = np.roll(self._common, 1, axis=1)
            self._in_common = np.roll(self._in_common, 1)

    def followers(self, layer: int, tokens: np.ndarray | list[int], mean: np.ndarray) -> np.ndarray:
        """Remember this layer of the new tokens, and say how often each expert [E] followed tokens like the last;
        `mean` [E] where little is alike."""
        last = self._add_one(layer, tokens) if isinstance(tokens, list) else self._add(layer, tokens)
        common = self._count_common(layer, last)
        self._in_common += common
        self._in_common -= self._common[layer]
        self._common[layer] = common
        alike = self._in_common + common
        alike[self._last] = 0  # itself
        weight = self._weight.take(np.maximum.reduce(alike) - alike, mode="clip")
        sums = weight @ self._followers[layer]
        return (sums[:-1] + 0.5 * mean) / (sums[-1] + 0.5)

    def _count_common(self, layer: int, words: list[int]) -> np.ndarray:
        """[N] how many of the experts in `words` each remembered token used."""
        counts = [np.bitwise_count(row & word) for row, word in zip(self._experts[layer], words, strict=True)]
        return counts[0] if len(counts) == 1 else np.add.reduce(counts, dtype=np.int16)

    def _add_one(self, layer: int, experts: list[int]) -> list[int]:
        row, followers = self._last, self._followers[layer]
        used = np.zeros(self._num_experts + 1, np.float32)
        used[experts] = 1
        used[-1] = 1
        followers[row] = 0
        before = slice(row - len(_LAGS), row) if row >= len(_LAGS) else np.arange(row - len(_LAGS), row)
        followers[before] += _LAGS * used
        words = [0] * self._experts.shape[1]
        for expert in experts:
            words[expert >> 6] |= 1 << (expert & 63)
        self._experts[layer, :, row] = np.array(words, np.uint64)
        return words

    def _add(self, layer: int, selected: np.ndarray) -> list[int]:
        """The rows of a prompt [T, K], the last ones if there are too many."""
        selected, followers = selected[-len(self._rows) :], self._followers[layer]
        used = np.zeros((len(selected), self._num_experts + 2), np.float32)
        np.put_along_axis(used, selected, 1, axis=1)  # a dropped rank, -1, goes to the last column
        used = used[:, :-1]
        used[:, -1] = 1
        followers[self._rows] = 0
        for lag, weight in enumerate(_LAGS[::-1, 0], start=1):
            followers[(self._rows - lag) % _MEMORY] += weight * used
        followers[self._last] = 0
        words = self._packed(used)
        self._experts[layer][:, self._rows] = words
        return words[:, -1].tolist()

    def _packed(self, used: np.ndarray) -> np.ndarray:
        """[W, T] 64 experts a word."""
        padded = np.zeros((len(used), self._experts.shape[1], 64), bool)
        padded.reshape(len(used), -1)[:, : self._num_experts] = used[:, :-1]
        return np.packbits(padded, axis=2, bitorder="little").view("<u8")[:, :, 0].T
