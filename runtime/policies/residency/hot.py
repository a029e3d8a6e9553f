"""The prompt says which experts stay resident while its answer is decoded (context-aware
GPU-NDP)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.quantisation.bit_allocation import prefix_split
from artifacts.quantisation.widths import USUAL_WIDTHS, columns_of
from artifacts.shape import FULL_BITS, Shape
from artifacts.traces.trace import DECODE, PREFILL
from runtime.policies.base import Artefacts, Placement, SimpleResidency, Step, check_choice
from runtime.policies.shared.misses import check_replicas
from runtime.policies.step import fitting

BEFORE = "before"
BEHIND = "behind"
SHARES = "shares"
ROUTER = "router"
PREFIX = "prefix"
EVEN = "uniform"


@dataclass
class Hot(SimpleResidency):
    """Places experts once per sequence, at its first decode step, by `S = a P/sum(P) + (1-a)
    W/sum(W)`: P are the prompt's activation counts of a layer, W its weight sums, a = `balance`.
    With several sequences, P and W are summed over the prompts of all that are decoded or wait to
    be.

    The experts of largest S fill the layer's slots at full precision. The others are computed near
    their memory. If `avg_bits` is 16, that is at full precision. Otherwise it is at 1 to 4 bits by
    the prefix split over the loss table, on average at most `avg_bits`, or with `bits=uniform` all
    at `avg_bits` (Table 3, "w/o Expert Bitwidth Selector"). Full precision is 4 bits on a base of 4
    bits, and 4 bits count as full precision where replicas of 4 bits are no smaller than the
    checkpoint's experts.

    `migrate` says when the hot experts come. `behind` the decoding, they are computed near at full
    precision until they have arrived. `before` it, as in the paper (section 4.1), the first decode
    step of a layer waits for the experts that it uses, and the others go on arriving behind it.

    `scores` says what W sums. `shares` are the weights of a token's experts over their sum, so that
    every token counts alike. `router`, as published, is the router's softmax of them, so that a
    token counts more if the router is sure of it. The default is `shares`, which every trace holds
    and every family of routers has, sigmoid or softmax.
    """

    places: ClassVar[bool] = True

    avg_bits: float = float(FULL_BITS)
    balance: float = 0.5
    migrate: str = BEHIND
    bits: str = PREFIX
    scores: str = SHARES

    def __post_init__(self) -> None:
        if self.avg_bits != FULL_BITS and not 1 <= self.avg_bits <= USUAL_WIDTHS[-1]:
            raise BadUsage(f"hot: avg_bits is 16 or in 1..4, not {self.avg_bits:g}")
        if not 0 <= self.balance <= 1:
            raise BadUsage(f"hot needs balance in 0..1, not {self.balance}")
        check_choice("hot", "migrate", self.migrate, BEFORE, BEHIND)
        check_choice("hot", "bits", self.bits, PREFIX, EVEN)
        check_choice("hot", "scores", self.scores, SHARES, ROUTER)
        if self.bits == EVEN and self.avg_bits != int(self.avg_bits):
            raise BadUsage(
                f"hot: bits={EVEN} needs avg_bits to be a whole number, not {self.avg_bits:g}"
            )

    @property
    def requires(self) -> frozenset[str]:
        return frozenset() if self.avg_bits == FULL_BITS else frozenset({"replicas"})

    @property
    def sees_probabilities(self) -> bool:
        return self.scores == ROUTER

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._loss = None
        if self.avg_bits != FULL_BITS:
            self._at_full = artefacts.replicas.at_full
            self.widths = tuple(bits for bits in USUAL_WIDTHS if bits not in self._at_full)
            check_replicas("hot", artefacts, *self.widths)
            self._loss = artefacts.replicas.loss[..., columns_of(USUAL_WIDTHS)]
        self._num_experts = shape.num_experts
        # By layer: counts and weight sums [2, E] of each request's prompt, the requests whose
        # prompt no placement has seen to its end, and those that have been decoded.
        self._prompts: list[dict[int, np.ndarray]] = [{} for _ in range(shape.num_layers)]
        self._waiting, self._decoded = ([set() for _ in range(shape.num_layers)] for _ in range(2))

    def observe(self, step: Step) -> None:
        if step.phase != PREFILL:
            return
        part = step if step.prompts is None else step.part(step.prompts, PREFILL)
        prompts = self._prompts[step.layer]
        decoded = self._decoded[step.layer]
        requests = _requests(part)
        scores = part.shares
        if self.scores == ROUTER:
            scores = np.take_along_axis(part.probabilities, part.selected, axis=1)
        for request in np.unique(requests).tolist():
            rows = requests == request
            self._waiting[step.layer].add(request)
            if request not in prompts or request in decoded:
                prompts[request] = np.zeros((2, self._num_experts))
                decoded.discard(request)
            counts, weights = prompts[request]
            np.add.at(counts, part.selected[rows], 1)
            np.add.at(weights, part.selected[rows], scores[rows])

    def place(self, step: Step, num_slots: Sequence[int]) -> Placement | None:
        if not (step.decodes and self._begins_to_decode(step)):
            return None
        score = self.importance(step.layer)
        order = np.lexsort((np.arange(self._num_experts), -score))
        bits = np.full(self._num_experts, FULL_BITS)
        hot = np.array(fitting(order.tolist(), num_slots), np.int64)
        cold = order[~np.isin(order, hot)]
        if self._loss is not None and cold.size:
            few = self._widths(step.layer, cold)
            bits[cold] = np.where(np.isin(few, self._at_full), FULL_BITS, few)
        return Placement(hot, bits, is_awaited=self.migrate == BEFORE)

    def _begins_to_decode(self, step: Step) -> bool:
        """Return whether a request that was waiting is decoded. If so, none waits any more, and
        requests that have ended are forgotten."""
        layer = step.layer
        decoded = set(
            _requests(step if step.prompts is None else step.part(~step.prompts, DECODE)).tolist()
        )
        waiting = self._waiting[layer]
        prompts = self._prompts[layer]
        if waiting.isdisjoint(decoded):
            return False
        self._prompts[layer] = {
            name: prompts[name] for name in prompts if name in waiting or name in decoded
        }
        self._waiting[layer] = set()
        self._decoded[layer] = decoded
        return True

    def _widths(self, layer: int, cold: np.ndarray) -> np.ndarray:
        """Return the bits of cold experts, given in falling order of score."""
        if self.bits == EVEN:
            return np.full(len(cold), int(self.avg_bits))
        return np.array(prefix_split(self._loss[layer, cold], self.avg_bits))

    def importance(self, layer: int) -> np.ndarray:
        """Return S [E] of the prompts of all requests under way; all equal before the first
        prompt."""
        if not self._prompts[layer]:
            return np.zeros(self._num_experts)
        counts, weights = sum(self._prompts[layer].values())
        return self.balance * counts / counts.sum() + (1 - self.balance) * weights / weights.sum()


def _requests(step: Step) -> np.ndarray:
    """Return the request [T] of each token; one for all where they are not known."""
    return np.zeros(len(step.selected), np.int64) if step.requests is None else step.requests
