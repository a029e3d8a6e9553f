"""The experts that routers ahead, fitted predictors, stored maps and running frequencies expect in
the layers ahead, each weighed by how right it has been (moectl's own)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from artifacts.traces.trace import DECODE, PREFILL
from runtime.policies.base import Artefacts, Now, Opening, Simple, Step
from runtime.policies.prefetch.ahead import keys_ahead, named, of_interest
from runtime.policies.shared.block import in_one_block
from runtime.policies.shared.maps import Guide

_TOKENS = np.array([4.0, 16.0, 64.0])  # time constants of the running frequencies
_RIDGE = 20.0  # observations that the first guess of the regression counts for


@dataclass
class Blend(Simple):
    """Proposes every expert of the next `distance` layers whose chance of use is at least `floor`
    in the next layer and `far` beyond, sooner layers first, likelier experts first.

    The chance is a logistic regression for each layer and distance, fitted online by a Newton step
    a visit. Its features are the margins, in log odds to the k-th place, by which the router ahead
    and the fitted predictor name an expert; its running log odds of use; and with `maps` the log
    odds of the matched map.

    A prompt wants nearly all experts: the experts that its tokens name are proposed in order of
    probability, after those of answers decoded beside it. With `maps`, the map that the embedding
    finds names experts of the first layer before a pass begins.
    """

    reads_predictions: ClassVar[bool] = True

    distance: int = 3
    floor: float = 0.25
    far: float = 0.5
    learned: bool = True
    maps: bool = False

    def __post_init__(self) -> None:
        if self.distance < 1 or not (0 < self.floor <= 1 and 0 < self.far <= 1):
            raise BadUsage("blend needs distance >= 1, 0 < floor <= 1 and 0 < far <= 1")
        needs = {"predictors": self.learned, "maps": self.maps}
        self.requires = frozenset(name for name, is_needed in needs.items() if is_needed)
        self.reads_learned = self.learned
        self.sees_probabilities = self.sees_embeddings = self.opens_passes = self.maps

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        # Imported late: numba takes long to load, and seconds when nothing is compiled yet.
        from runtime.policies.prefetch import blend_kernels

        self._kernels = blend_kernels
        self._shape = shape
        self._reach = min(self.distance, shape.num_layers)
        self.matching = artefacts.matching if self.maps else None
        self._guides = (
            [Guide(self.matching, ahead) for ahead in range(1, self._reach + 1)]
            if self.maps
            else []
        )
        self._unheard = np.zeros((0, 0, shape.num_experts), np.float32)
        self._unmapped = np.zeros((0, shape.num_experts))
        num_known = 1 + 2 * (1 + self.learned) + len(_TOKENS) + self.maps
        state, views = self._first(num_known)
        self._gains, _, _, self._predicted, *_ = views
        self._num_tokens = 1  # that the gains are for
        self._state = (
            state,
            shape.num_layers,
            self._reach,
            num_known,
            shape.num_experts,
        )  # as the kernels take it

    def _first(self, num_known: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the block that `blend_kernels.visit` describes, before the first step, and views
        of its parts. There is a regression for each layer and distance."""
        shape = self._shape
        size = (self._shape.num_layers, self._reach)
        even = shape.top_k / shape.num_experts
        weights = np.zeros((*size, num_known))
        weights[..., 0] = -1.0
        weights[..., 1:-1:2] = 0.5
        uses = np.full((shape.num_layers, len(_TOKENS), shape.num_experts), even)
        return in_one_block(
            1 / _TOKENS,
            uses,
            np.full(uses.shape, _log_odds(np.float64(even), self._kernels.LEAST)),
            np.full((*size, shape.num_experts), np.nan),
            weights,
            np.tile(np.eye(num_known) * _RIDGE, (*size, 1, 1)),
            np.zeros((*size, num_known, shape.num_experts)),
        )

    def propose_first(self, opening: Opening, now: Now) -> np.ndarray:
        match = self._guides[0].first_match(opening)
        if match is None:
            return np.empty(0, np.int64)
        chance = match.probabilities[:, 0].max(axis=0) * self._shape.top_k
        likely = np.flatnonzero(chance >= self.floor)
        return likely[np.argsort(-chance[likely], kind="stable")]

    def propose(self, step: Step, now: Now) -> np.ndarray:
        if self.matching:
            self.matching.see(step)
        if step.prompts is None:
            return self._proposed(step)
        parts = step.part(~step.prompts, DECODE), step.part(step.prompts, PREFILL)
        return np.concatenate([self._proposed(part) for part in parts])

    def _proposed(self, step: Step) -> np.ndarray:
        num_tokens = len(step.selected)
        top_k = self._shape.top_k
        learns = step.phase != PREFILL
        if num_tokens != self._num_tokens:
            self._num_tokens = num_tokens
            self._gains[:] = 1 / _TOKENS if num_tokens == 1 else 1 - (1 - 1 / _TOKENS) ** num_tokens
        visit = np.array(step.selected, np.int64), step.layer, learns, *self._state
        if not learns and step.layer + 1 < self._shape.num_layers:
            self._kernels.visit(*visit)
            foreseen = of_interest(step, step.foreseen, 1, self._shape)
            return keys_ahead(step, 1, self._shape, named(foreseen, top_k))
        return self._kernels.likely(
            *visit,
            top_k,
            self._heard(step.predicted),
            self._heard(step.learned) if self.learned else self._unheard,
            np.arange(num_tokens) if step.last is None else step.last,
            self._mapped(step) if self._guides else self._unmapped,
            self.floor,
            self.far,
        )

    def _heard(self, said: np.ndarray | None) -> np.ndarray:
        """Return [T, D or more, E] the predictions of a source, as the kernel takes them."""
        assert said is not None and said.shape[1] >= self._reach, (
            "a policy that reads predictions runs without them"
        )
        return np.array(said, np.float32, order="C")

    def _mapped(self, step: Step) -> np.ndarray:
        """Return [D, E] log odds by the matched map of the requests, 0 where nothing is matched."""
        log_odds = np.zeros((self._reach, self._shape.num_experts))
        for ahead, guide in enumerate(self._guides):
            if (said := guide.predict(step)) is not None:
                log_odds[ahead] = _log_odds(
                    said[0].max(axis=0) * self._shape.top_k, self._kernels.LEAST
                )
        return log_odds


def _log_odds(p: np.ndarray, least: float) -> np.ndarray:
    held = np.clip(p, least, 1 - least)
    return np.log(held / (1 - held))
