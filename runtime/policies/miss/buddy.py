"""Let a resident expert that is often co-activated with the missing one stand in for it (BuddyMoE;
lossy)."""

from dataclasses import dataclass

import numpy as np

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage
from artifacts.routing.entropy import EntropyHistogram, token_entropy
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Choice, Residents, Simple, Step, check_choice
from runtime.policies.shared.misses import by_probability, drawn, keep_sum, stand_in

BUDDY = "buddy"
RANDOM = "random_resident"
BEST = "best_resident"
ZERO = "zero"
STAND_INS = (BUDDY, RANDOM, BEST, ZERO)
LAYER = "layer"
TOKEN = "token"
COACTIVATION = "coactivation"


def substitute(
    selected: np.ndarray, resident: np.ndarray, buddies: np.ndarray, max_rank: int
) -> np.ndarray:
    """Replace missing experts by the first of their buddies that is resident and not used by the
    same token.

    `selected` [T, K] expert ids, `resident` [E] bool, `buddies` [E, R] ids in list order padded
    with -1; the first `max_rank` buddies are tried. Ranks are visited from 0 upward. Returns
    selected' [T, K], in which experts without such a buddy stay.
    """
    psi = -np.arange(buddies.shape[1], dtype=np.float32)
    score = np.broadcast_to(psi, (selected.shape[0], *buddies.shape))
    return _replace(
        selected, ~resident[selected], resident, buddies[:, :max_rank], score[:, :, :max_rank]
    )


def _replace(
    selected: np.ndarray,
    replaceable: np.ndarray,
    resident: np.ndarray,
    buddies: np.ndarray,
    psi: np.ndarray,
) -> np.ndarray:
    """Replace the ranks in `replaceable` [T, K] as `substitute` does, but by the buddy of largest
    `psi` [T, E, H], ties in list order."""
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
        served = np.flatnonzero(np.isfinite(score.max(axis=1, initial=-np.inf)))
        selected[tokens[served], rank] = peers[served, best[served]]
    return selected


def _weakest(missing: np.ndarray, most: int | np.ndarray) -> np.ndarray:
    """Return [T, K] the `most` (a number, or [T, 1]) weakest ranks of each token in `missing`."""
    from_weakest = missing[:, ::-1].cumsum(axis=1)[:, ::-1]
    return missing & (from_weakest <= most)


def _at(percentile: float, percentiles: np.ndarray) -> float:
    """Return the value at `percentile` of [101] values at 0, 1 .. 100 %."""
    return float(np.interp(percentile, np.arange(len(percentiles)), percentiles))


def _share_absent(step: Step, residents: Residents) -> float:
    wanted = np.unique(step.selected)
    return residents.absent[wanted].sum() / len(wanted)


@dataclass
class Buddy(Simple):
    """BuddyMoE's three gates and its choice.

    A token may be served by buddies when its activating entropy exceeds the layer's profiled
    `percentile` (weights tempered by `temperature`) and its two strongest shares differ by less
    than `margin`; a step only while less than `beta` of its wanted experts is absent. Among the
    first `reach` buddies the largest `psi = q (1 + eta z) (1 - kappa hop)` wins, z the router
    probability of the buddy over the token's largest, hop its distance in devices. The lists are
    the newest in the store, or the newest by `metric=coactivation`. A replaceable rank without a
    buddy is fetched, or dropped with `otherwise=drop`.

    The `keep` strongest ranks of a token are never replaced; below 1 that is the share of its
    ranks, rounded down. At most `rho` of the others are, the weakest first: in each layer, or with
    `over=token` in all layers of a pass together, earlier layers first. At most the share `quota`
    of all ranks that a layer has seen so far is replaced.

    The profile's percentiles are of weights as they are. At another `temperature` than 1 the
    percentile is that of the layer's tokens of this run so far, tempered, this step's included.

    With another `stand_in` the same ranks go to a control of that name (random_resident, drawn from
    `seed`, best_resident, zero). The stand-in changes what is resident later, and so how much is
    absent; under a quota that binds, all stand-ins replace the same share.
    """

    percentile: float = 15.0
    temperature: float = 1.0
    margin: float = float("inf")
    beta: float = 1.0
    reach: int = 16
    metric: str | None = None
    keep: float = 0.0
    rho: int | None = None
    over: str = LAYER
    eta: float = 0.0
    kappa: float = 0.0
    otherwise: str = "fetch"
    renormalise: bool = False
    stand_in: str = BUDDY
    seed: int = 0
    quota: float = 1.0

    def __post_init__(self) -> None:
        if self.stand_in not in STAND_INS:
            raise BadUsage(unknown("stand-in of buddy", self.stand_in, STAND_INS))
        check_choice("buddy", "otherwise", self.otherwise, "fetch", "drop")
        check_choice("buddy", "over", self.over, LAYER, TOKEN)
        if self.metric not in (None, COACTIVATION):
            raise BadUsage(
                f"buddy: metric is coactivation, or None for the newest lists, not {self.metric!r}"
            )
        if self.keep < 0 or self.keep > 1 and self.keep % 1:
            raise BadUsage(
                f"buddy needs a keep of whole ranks, or below 1 a share of them, not {self.keep:g}"
            )
        if (
            not 0 <= self.percentile <= 100
            or self.temperature <= 0
            or self.reach < 1
            or (self.rho or 0) < 0
        ):
            raise BadUsage(
                "buddy needs percentile in 0..100, temperature > 0, reach >= 1 and rho >= 0"
            )
        if not 0 <= self.quota <= 1:
            raise BadUsage(f"buddy needs a quota in 0..1, not {self.quota:g}")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"entropy", "coactivated" if self.metric else "buddies"})

    @property
    def sees_probabilities(self) -> bool:
        return self.eta != 0 or self.stand_in == BEST

    @property
    def every_step(self) -> bool:
        return self.quota < 1 or self.temperature != 1

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        buddies, q = (
            artefacts.coactivated if self.metric else (artefacts.buddies, artefacts.buddy_q)
        )
        self._buddies = buddies[:, :, : self.reach]
        hops = np.zeros(shape.num_experts) if artefacts.hops is None else artefacts.hops
        self._near_q = q[:, :, : self.reach] * (1 - self.kappa * hops[self._buddies])
        self._tau = np.array([_at(self.percentile, row) for row in artefacts.entropy])
        self._entropies = [
            EntropyHistogram() for _ in range(shape.num_layers if self.temperature != 1 else 0)
        ]
        self._keep = int(self.keep if self.keep >= 1 else self.keep * shape.top_k)
        self._pass_index = -1
        self._spent = np.zeros(0, np.int64)
        self._drawn = drawn(np.random.default_rng(self.seed), shape.num_experts)
        self._seen, self._served = np.zeros((2, shape.num_layers))

    def choose(self, step: Step, residents: Residents) -> Choice:
        self._begin(step)
        replaceable = self._within_quota(step.layer, self.replaceable(step, residents))
        if not replaceable.any():
            return Choice(step.selected)
        selected = _replace(
            step.selected,
            replaceable,
            residents.resident,
            self._buddies[step.layer],
            self._psi(step),
        )
        if self.stand_in != BUDDY:
            selected = self._exchanged(step, residents, selected != step.selected)
        if self.otherwise == "drop":
            selected = np.where(replaceable & (selected == step.selected), -1, selected)
        replaced = selected != step.selected
        self._served[step.layer] += replaced.sum()
        if self.over == TOKEN:
            self._spent += replaced.sum(axis=1)
        return Choice(
            selected, weights=keep_sum(step.weights, selected) if self.renormalise else None
        )

    def replaceable(self, step: Step, residents: Residents) -> np.ndarray:
        """Return [T, K] bool, the absent ranks that the gates, `keep` and `rho` allow to be
        replaced."""
        if _share_absent(step, residents) >= self.beta:
            return np.zeros(step.selected.shape, bool)
        missing = residents.absent[step.selected] & self._may_replace(step)[:, None]
        missing[:, : self._keep] = False
        if self.rho is None:
            return missing
        return _weakest(
            missing, self.rho if self.over == LAYER else self.rho - self._spent[:, None]
        )

    def _begin(self, step: Step) -> None:
        """Count the step's ranks, forget what tokens of the pass before have spent, and calibrate
        tempered entropy."""
        self._seen[step.layer] += step.selected.size
        if self.over == TOKEN and step.pass_index != self._pass_index:
            self._pass_index = step.pass_index
            self._spent = np.zeros(len(step.selected), np.int64)
        if self.temperature != 1:
            entropies = self._entropies[step.layer]
            entropies.update(token_entropy(step.weights, temperature=self.temperature))
            self._tau[step.layer] = _at(self.percentile, entropies.percentiles())

    def _within_quota(self, layer: int, replaceable: np.ndarray) -> np.ndarray:
        """Return [T, K] the weakest ranks of all tokens in `replaceable`, as many as the layer's
        quota still allows."""
        if self.quota == 1:
            return replaceable
        room = int(max(0, self.quota * self._seen[layer] - self._served[layer]))
        allowed = np.zeros_like(replaceable)
        from_weakest = allowed[:, ::-1].T
        from_weakest[tuple(places[:room] for places in replaceable[:, ::-1].T.nonzero())] = True
        return allowed

    def _exchanged(self, step: Step, residents: Residents, replaced: np.ndarray) -> np.ndarray:
        """Return `selected` [T, K] with the ranks in `replaced` [T, K] served by the control
        instead of their buddies."""
        if self.stand_in == ZERO:
            return np.where(replaced, -1, step.selected)
        scores = self._drawn if self.stand_in == RANDOM else by_probability(step)
        return stand_in(step.selected, replaced, residents.resident, scores)

    def _may_replace(self, step: Step) -> np.ndarray:
        """Return [T] bool, whether the gates allow each token's ranks to be replaced."""
        shares = np.sort(step.shares, axis=1)
        gap = shares[:, -1] - shares[:, -2] if shares.shape[1] > 1 else np.ones(len(shares))
        return (
            token_entropy(step.weights, temperature=self.temperature) > self._tau[step.layer]
        ) & (gap < self.margin)

    def _psi(self, step: Step) -> np.ndarray:
        """Return [T, E, H] the score of each buddy of each expert for each token."""
        q = self._near_q[step.layer]
        if not self.eta:
            return np.broadcast_to(q, (len(step.selected), *q.shape))
        assert step.probabilities is not None, (
            "buddy with eta > 0 runs without router probabilities"
        )
        z = step.probabilities / step.probabilities.max(axis=1, keepdims=True)
        return q * (1 + self.eta * z[:, self._buddies[step.layer]])
