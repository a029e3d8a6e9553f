"""Prices substitution: measures how much worse a model reads held-out text when a policy replaces
absent experts.

The resident experts are drawn at random and do not change; every token is a decode step of its own;
experts that the policy does not replace are computed exactly. The perplexity ratio is therefore the
price of the replacements alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional as F

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from artifacts.traces.trace import DECODE
from profilers.compare.quality import standard_error
from profilers.text.batches import check_sequences, padded, real_rows
from runtime.engine.one_expert import OneExpertRunner, Routed
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts, Miss, Residents, Step
from runtime.policies.miss.buddy import Buddy


@dataclass(frozen=True, slots=True)
class SubstitutionLimits:
    """Limits within which a token's absent experts may be replaced; the others are fetched.

    The fields have the meaning that they have in the buddy policy. Without `percentile` there is no
    entropy gate. `beta` bounds the share of a token's experts that are absent, `rho` its number of
    replacements (None: no limit).
    """

    name: str
    percentile: float | None = None
    margin: float = math.inf
    beta: float = math.inf
    rho: int | None = None


@dataclass(frozen=True, slots=True)
class SubstitutionPrice:
    """The price of one policy with one draw of residents. `absent` and `replaced` are shares of all
    ranks; `ratio` is perplexity over the perplexity of the full model, with its standard error. A
    dropped rank counts as replaced."""

    absent: float
    replaced: float
    ratio: float
    loss_error: float


class Substitution:
    """Prices policies on `sequences`. `entropy` [L, 101] are the profile's percentiles of token
    activating entropy."""

    def __init__(
        self,
        opened: MoeModel,
        sequences: Sequence[np.ndarray],
        entropy: np.ndarray,
        *,
        batch: int = 16,
    ) -> None:
        self._opened = opened
        self._sequences = sequences
        self._batch = batch
        self._entropy = entropy
        check_sequences(opened.model, sequences)
        self._full = self._nll(lambda routed, real: routed.selected)

    @property
    def perplexity(self) -> float:
        """Perplexity of the full model."""
        return math.exp(self._full.mean())

    def price(
        self, policy: Miss, limits: SubstitutionLimits, residents: np.ndarray
    ) -> SubstitutionPrice:
        """Return the price of a prepared policy within limits; `residents` is [L, E] bool."""
        replacing = _Replacing(
            policy, _gate(limits, self._entropy, self._opened.shape), limits.beta, residents
        )
        lost = self._nll(replacing.choose) - self._full
        ratio = math.exp(lost.mean())
        return SubstitutionPrice(
            replacing.num_absent / replacing.num_ranks,
            replacing.num_replaced / replacing.num_ranks,
            ratio,
            ratio * standard_error(lost),
        )

    def _nll(self, choose: Callable[[Routed, np.ndarray], np.ndarray]) -> torch.Tensor:
        """Return the negative log-likelihood [N] float64 of every token but the first of each
        sequence."""
        found = []
        real = np.ones(0, bool)
        with OneExpertRunner(self._opened, lambda routed: choose(routed, real)) as runner:
            for start in range(0, len(self._sequences), self._batch):
                ids, mask = padded(self._sequences[start : start + self._batch])
                real = real_rows(ids, mask)
                logits = runner.forward(ids, mask)
                for row, sequence in zip(
                    logits, self._sequences[start : start + self._batch], strict=True
                ):
                    targets = torch.from_numpy(sequence[1:]).to(row.device)
                    found.append(
                        F.cross_entropy(row[: len(targets)].float(), targets, reduction="none")
                        .double()
                        .cpu()
                    )
        return torch.cat(found)


def random_residents(shape: Shape, share: float, seed: int) -> np.ndarray:
    """Return [L, E] bool: the same number of experts in every layer, drawn at random."""
    count = round(share * shape.num_experts)
    if not 0 < count <= shape.num_experts:
        raise BadUsage(
            f"a resident share of {share:g} leaves {count} of {shape.num_experts} experts of a "
            "layer"
        )
    random = np.random.default_rng(seed)
    return random.random((shape.num_layers, shape.num_experts)).argsort(axis=1) < count


class _Replacing:
    """Applies a policy to the tokens and ranks that the limits allow, and counts absent and
    replaced ranks."""

    def __init__(self, policy: Miss, gate: Buddy, beta: float, residents: np.ndarray) -> None:
        self._policy = policy
        self._gate = gate
        self._beta = beta
        self._residents = residents
        self._sees_probabilities = policy.sees_probabilities
        self.num_ranks = self.num_absent = self.num_replaced = 0

    def choose(self, routed: Routed, real: np.ndarray) -> np.ndarray:
        resident = self._residents[routed.layer]
        absent = ~resident[routed.selected]
        rows = np.flatnonzero(real & absent.any(axis=1) & (absent.mean(axis=1) < self._beta))
        selected = routed.selected.copy()
        if rows.size:
            selected[rows] = self._replaced(routed, rows, Residents(resident, ~resident, (0,)))
        self.num_ranks += int(real.sum()) * absent.shape[1]
        self.num_absent += int(absent[real].sum())
        self.num_replaced += int((selected != routed.selected)[real].sum())
        return selected

    def _replaced(self, routed: Routed, rows: np.ndarray, residents: Residents) -> np.ndarray:
        at = torch.from_numpy(rows).to(routed.weights.device)
        step = Step(
            pass_index=0,
            phase=DECODE,
            layer=routed.layer,
            selected=routed.selected[rows],
            weights=routed.weights[at].float().cpu().numpy(),
            probabilities=routed.probabilities[at].cpu().numpy()
            if self._sees_probabilities
            else None,
        )
        allowed = self._gate.replaceable(step, residents)
        return np.where(allowed, self._policy.choose(step, residents).selected, step.selected)


def _gate(limits: SubstitutionLimits, entropy: np.ndarray, shape: Shape) -> Buddy:
    """Return the gates of the buddy policy without `beta`, which `_Replacing` applies to each
    token."""
    gate = Buddy(
        percentile=limits.percentile or 0, margin=limits.margin, beta=math.inf, rho=limits.rho
    )
    if limits.percentile is None:
        entropy = np.full_like(entropy, -1)  # below the entropy of any token
    none = np.full((shape.num_layers, shape.num_experts, 1), -1)
    gate.prepare(shape, Artefacts(buddies=none, buddy_q=np.zeros(none.shape), entropy=entropy))
    return gate


def buddy_policy(artefacts: Artefacts, shape: Shape) -> Buddy:
    """Return the buddy policy without gates: the first resident expert of its list replaces every
    absent expert."""
    policy = Buddy(beta=math.inf)
    policy.prepare(shape, replace(artefacts, entropy=np.full((shape.num_layers, 101), -1.0)))
    return policy
