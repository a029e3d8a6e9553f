"""Horizon: evict the key whose next use is expected last; how often each key comes is learned while
the run goes on."""

from dataclasses import dataclass

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step
from runtime.policies.shared.block import in_one_block

# time constants of the running frequencies; one more is a mean
_TOKENS = (1, 4, 16, 64)
_PRIOR_TOKENS = 4  # tokens of even use that the mean starts from
_RIDGE = 20  # observations that the first guess of the regression counts for
_MEMORY = 1024  # tokens remembered
# a past token with nothing in common weighs exp(-15) of one that agrees everywhere
_SHARPNESS = (15, 40)
# weights: what is never used waits 5 passes, what always is, 1
_GUESS = np.array([5, 0, -0.2, -0.8, 0, 0, -2, -1])


@dataclass
class Horizon(SimpleEviction):
    """Evicts the key with the largest `now + L w` first, where w is the expected wait for the key's
    next use, in passes. The first pass counts 1, each later one .85 of the one before, so that no
    wait is longer than 6.7.

    w is linear in the square roots of what is known of a key when its layer has run. These are its
    running frequencies over about 1, 4, 16 and 64 tokens, its mean over the whole run, and how
    often it followed the past tokens most similar to the newest (`_Recall`), with two notions of
    similarity. The weights are shared by all keys and fitted online by weighted least squares. If a
    step carries predictions for the layers ahead, the chance q of use at that visit is fitted too,
    and the expected time becomes `visit + (1 - q) L w`.
    """

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        # Imported late: numba takes long to load, and seconds when nothing is compiled yet.
        from runtime.policies.shared import horizon_kernels

        self._kernels = horizon_kernels
        self._shape = shape
        num_layers = shape.num_layers
        num_experts = shape.num_experts
        even = horizon_kernels.SURE * shape.top_k // num_experts
        self._recall = _Recall(shape)
        self._ahead = _Ahead(shape, 0)
        self._state, views = in_one_block(
            np.zeros(len(_TOKENS) + 1),
            np.rint(_GUESS * horizon_kernels.ONE),
            np.zeros(num_experts),
            np.zeros((num_layers, num_experts)),
            np.full((num_layers, num_experts), horizon_kernels.MOST),
            np.full((num_layers, len(_GUESS) - 1, num_experts), even),
            np.zeros((num_layers, len(_GUESS), num_experts)),
            dtype=np.int64,
        )
        # as in `on_use`
        self._gains, weights, self._share, self._used, _, _, self._known = views
        self._before = self._known.copy()
        self._nearness = np.full((num_layers, num_experts), -float("inf"))
        self.ranks = self._nearness.reshape(-1), np.zeros(shape.num_keys, np.int64)
        self._weights = weights
        self._moments = np.eye(len(weights), dtype=np.int64) * (_RIDGE * horizon_kernels.ONE)
        self._products = _RIDGE * weights
        self._nothing = np.zeros((0, 0, num_experts), np.float32), np.zeros(0, np.int64)
        self._num_tokens = self._pass_index = 0

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        if now.pass_index != self._pass_index or not self._num_tokens:
            self._begin_pass(step, now)
        layer = step.layer
        recall = self._recall
        if not self._is_single:
            self._share[:] = self._shares(step)
        if self._is_prompt:
            recall.add_prompt(layer, step.selected)
        predicted, last = self._foreseen(step)
        self._kernels.on_use(
            np.array(keys, np.int64),
            layer,
            now.step,
            recall.newest,
            recall.num_tokens,
            self._is_single,
            self._is_prompt,
            self._shape.top_k,
            predicted,
            last,
            self._state,
            self._nearness,
            recall.experts,
            recall.common,
            recall.like,
            self._ahead.distance,
            self._ahead.state,
        )

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        return (self.ranks[0][keys],)

    def _shares(self, step: Step) -> np.ndarray:
        """Return the share [E] of the step's tokens that used each expert, of SURE."""
        kept = step.selected[step.selected >= 0]
        uses = np.bincount(kept, minlength=self._shape.num_experts)
        return uses * self._kernels.SURE // len(step.selected)

    # Once a pass

    def _begin_pass(self, step: Step, now: Now) -> None:
        if self._num_tokens and self._is_decode:
            fitted = self._moments, self._products
            self._kernels.learn(self._weights, self._before, self._known, self._used, *fitted)
            self._kernels.solve(*fitted, self._weights)
        self._ahead.solve()
        self._before[:] = self._known
        num_tokens = len(step.selected)
        self._is_decode = step.decodes
        self._is_single = num_tokens == 1
        self._is_prompt = not (self._is_decode or self._is_single)
        self._num_tokens += num_tokens
        self._pass_index = now.pass_index
        sure = self._kernels.SURE
        slow = num_tokens * sure // (self._num_tokens + _PRIOR_TOKENS)
        for place, tokens in enumerate(_TOKENS):
            self._gains[place] = max(sure - power(sure - sure // tokens, num_tokens), slow)
        self._gains[-1] = slow
        self._recall.begin_pass(num_tokens if self._is_prompt else 1)

    # Predictions

    def _foreseen(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Return the predictions [T, D, E] of the step, and the rows whose tokens predict past the
        last layer."""
        foreseen = step.foreseen
        if foreseen is None:
            return self._nothing
        if foreseen.shape[1] > self._ahead.distance:
            self._ahead.reach(foreseen.shape[1])
        last = np.arange(len(foreseen)) if step.last is None else step.last
        return np.array(foreseen, np.float32, order="C"), last


def power(share: int, times: int) -> int:
    """Return a share, of 2^30, to the power of `times`."""
    found = 1 << 30
    while times and found:
        found = found * share >> 30
        times -= 1
    return found


_LN2 = 744261118  # of 2^30


def faded(exponent: int) -> int:
    """Return exp(-exponent) of 2^20, with the exponent in units of 2^-30."""
    halvings, rest = divmod(exponent, _LN2)
    found = term = 1 << 30
    for place in range(1, 12):
        term = (term * rest >> 30) // place
        found += -term if place % 2 else term
    return found >> min(10 + halvings, 62)


class _Ahead:
    """The chance of use at a layer's next visit, for each of `distance` layers ahead: a regression
    on what a router some layers before predicts, and on the rate behind the learned wait."""

    def __init__(self, shape: Shape, distance: int) -> None:
        self._shape = shape
        self.distance = distance
        guess = np.tile([0.5, 0.5, 0.0], (distance, 1))
        self._lay_out(
            np.zeros((distance, shape.num_layers)),
            guess,
            np.tile(np.eye(3) * _RIDGE, (distance, 1, 1)),
            _RIDGE * guess,
            np.zeros((distance, shape.num_layers, 3, shape.num_experts)),
        )

    def reach(self, distance: int) -> None:
        """Extend to at least `distance` layers ahead."""
        farther = _Ahead(self._shape, distance - self.distance)
        self._lay_out(
            *(np.concatenate(pair) for pair in zip(self._views, farther._views, strict=True))
        )
        self.distance = distance

    def _lay_out(self, *arrays: np.ndarray) -> None:
        """Put what `look_ahead` takes last into one block: `is_pending` [D, L], `weights` [D, 3],
        `moments` [D, 3, 3], `products` [D, 3], `known` [D, L, 3, E]."""
        self.state, self._views = in_one_block(*arrays)
        _, self.weights, self.moments, self.products, _ = self._views

    def solve(self) -> None:
        if self.distance:
            self.weights[:] = np.linalg.solve(self.moments, self.products[..., None])[..., 0]


class _Recall:
    """Remembers tokens, and how many experts the newest has in common with each: a ring of the last
    `_MEMORY`, newer ones before older ones. Requests that decode together count as one token.

    Similarity: how many experts two tokens have in common over the last L layers, this layer
    counted twice.
    """

    def __init__(self, shape: Shape) -> None:
        # 1: the token used it
        self.experts = np.zeros((shape.num_layers, shape.num_experts, _MEMORY), np.uint8)
        # [L + 1, N] by age, the newest first: experts in common at each layer, and in all
        self.common = np.zeros((shape.num_layers + 1, _MEMORY), np.int16)
        most = shape.top_k * (shape.num_layers + 1)
        self.like = np.array(
            [
                [faded((sharp * less << 30) // most) for less in range(most + 1)]
                for sharp in _SHARPNESS
            ],
            np.int32,
        )
        self.newest = self.num_tokens = 0

    def begin_pass(self, num_rows: int) -> None:
        """Make room for `num_rows` tokens. What a token of an age had in common now counts for the
        token that has this age."""
        self.newest = (self.newest - num_rows) % _MEMORY
        self.num_tokens = min(self.num_tokens + num_rows, _MEMORY)
        if num_rows > 1:
            self.common[:] = 0

    def add_prompt(self, layer: int, selected: np.ndarray) -> None:
        """Remember this layer of a prompt's tokens, `selected` [T, K]: the last ones if there are
        too many."""
        selected = selected[-_MEMORY:]
        used = np.zeros((len(selected), self.experts.shape[1] + 1), np.uint8)
        np.put_along_axis(used, selected, 1, axis=1)  # a dropped rank (-1) goes to the last column
        slots = (self.newest + np.arange(len(selected))[::-1]) % _MEMORY
        self.experts[layer][:, slots] = used[:, :-1].T
