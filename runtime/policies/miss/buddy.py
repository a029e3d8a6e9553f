"""Let a resident expert that is often co-activated with the missing one stand in for it (BuddyMoE; lossy)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.entropy import token_entropy
from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Choice, Residents, Simple, Step
from runtime.policies.miss.weights import keep_sum


def substitute(selected: np.ndarray, resident: np.ndarray, buddies: np.ndarray, max_rank: int) -> np.ndarray:
    """Replace missing experts by the first of their buddies that is resident and not used by the same token.

    `selected` [T, K] expert ids, `resident` [E] bool, `buddies` [E, R] ids in list order padded with -1; the first
    `max_rank` buddies are tried. Ranks are visited from 0 upward. Returns selected' [T, K]; what finds no buddy stays.
    """
    psi = -np.arange(buddies.shape[1], dtype=np.float32)
    score = np.broadcast_to(psi, (selected.shape[0], *buddies.shape))
    return _replace(selected, ~resident[selected], resident, buddies[:, :max_rank], score[:, :, :max_rank])


def _replace(
    selected: np.ndarray, replaceable: np.ndarray, resident: np.ndarray, buddies: np.ndarray, psi: np.ndarray
) -> np.ndarray:
    """As `substitute`, for the ranks in `replaceable` [T, K], by the largest `psi` [T, E, H]; equals in list order."""
    selected = selected.copy()
    for rank in range(selected.shape[1]):
        tokens = np.flatnonzero(replaceable[:, rank])
        if not tokens.size:
            continue
        missing = selected[tokens, rank]
        peers = buddies[missing]  # [t, H]
        used = (peers[:, :, None] == selected[tokens][:, None, :]).any(axis=2)
        score = np.where((peers >= 0) & resident[peers] & ~used, psi[tokens, missing], -np.inf)
        best = score.argmax(axis=1) if score.shape[1] else np.zeros(tokens.size, np.int64)
        found = np.flatnonzero(np.isfinite(score.max(axis=1, initial=-np.inf)))
        selected[tokens[found], rank] = peers[found, best[found]]
    return selected


def _weakest(missing: np.ndarray, most: int) -> np.ndarray:
    """[T, K] of `missing`, the `most` weakest ranks of each token."""
    from_weakest = missing[:, ::-1].cumsum(axis=1)[:, ::-1]
    return missing & (from_weakest <= most)


def _share_absent(step: Step, residents: Residents) -> float:
    wanted = np.unique(step.selected)
    return residents.absent[wanted].sum() / len(wanted)


@dataclass
class Buddy(Simple):
    """BuddyMoE's three gates and its choice.

    A token may be served by buddies when its activating entropy exceeds the layer's profiled `percentile` (weights
    tempered by
    `temperature`) and its two strongest shares differ by less than `margin`; a step only while less than `beta` of
    its wanted
    experts is absent. Among the first `reach` buddies the largest `psi = q (1 + eta z) (1 - kappa hop)` wins, z the
    router
    probability of the buddy over the token's largest, hop its distance in devices; at most `rho` ranks of a token are
    replaced,
    the weakest first. A replaceable rank that finds no buddy is fetched, or dropped with `otherwise=drop`.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"buddies", "entropy"})

    percentile: float = 15.0
    temperature: float = 1.0
    margin: float = float("inf")
    beta: float = 1.0
    reach: int = 16
    rho: int | None = None
    eta: float = 0.0
    kappa: float = 0.0
    otherwise: str = "fetch"
    renormalise: bool = False

    def __post_init__(self) -> None:
        if self.otherwise not in ("fetch", "drop"):
            raise BadUsage(f"buddy: otherwise is fetch or drop, not {self.otherwise!r}")
        if not 0 <= self.percentile <= 100 or self.temperature <= 0 or self.reach < 1 or (self.rho or 0) < 0:
            raise BadUsage("buddy needs percentile in 0..100, temperature > 0, reach >= 1 and rho >= 0")

    @property
    def sees_probabilities(self) -> bool:
        return self.eta != 0

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._buddies = artefacts.buddies[:, :, : self.reach]
        hops = np.zeros(shape.num_experts) if artefacts.hops is None else artefacts.hops
        self._near_q = artefacts.buddy_q[:, :, : self.reach] * (1 - self.kappa * hops[self._buddies])
        levels = np.arange(artefacts.entropy.shape[1])
        self._tau = np.array([np.interp(self.percentile, levels, row) for row in artefacts.entropy])

    def choose(self, step: Step, residents: Residents) -> Choice:
        replaceable = self.replaceable(step, residents)
        if not replaceable.any():
            return Choice(step.selected)
        selected = _replace(step.selected, replaceable, residents.resident, self._buddies[step.layer], self._psi(step))
        if self.otherwise == "drop":
            selected = np.where(replaceable & (selected == step.selected), -1, selected)
        return Choice(selected, weights=keep_sum(step.weights, selected) if self.renormalise else None)

    def replaceable(self, step: Step, residents: Residents) -> np.ndarray:
        """[T, K] bool: the absent ranks that the gates and `rho` leave to stand-ins."""
        if _share_absent(step, residents) >= self.beta:
            return np.zeros(step.selected.shape, bool)
        missing = residents.absent[step.selected] & self._may_replace(step)[:, None]
        return missing if self.rho is None else _weakest(missing, self.rho)

    def _may_replace(self, step: Step) -> np.ndarray:
        """[T] bool: the gates of each token."""
        shares = np.sort(step.shares, axis=1)
        gap = shares[:, -1] - shares[:, -2] if shares.shape[1] > 1 else np.ones(len(shares))
        return (token_entropy(step.weights, temperature=self.temperature) > self._tau[step.layer]) & (gap < self.margin)

    def _psi(self, step: Step) -> np.ndarray:
        """[T, E, H] score of each buddy of each expert for each token."""
        q = self._near_q[step.layer]
        if not self.eta:
            return np.broadcast_to(q, (len(step.selected), *q.shape))
        assert step.probabilities is not None, "buddy with eta > 0 runs without router probabilities"
        z = step.probabilities / step.probabilities.max(axis=1, keepdims=True)
        return q * (1 + self.eta * z[:, self._buddies[step.layer]])
