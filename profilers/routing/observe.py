"""Observes a model's routers on text: use by phase, co-activation, entropy and, on request, whole
traces.

All counts are additive, so batches and shards merge to the same numbers in any order.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from artifacts.routing.coactivation import Coactivation, additive_shares
from artifacts.routing.entropy import EntropyHistogram, token_entropy
from artifacts.routing.expert_maps import mean_rows
from artifacts.traces.trace import PHASES, Trace
from profilers.routing.teacher_forced import TokenPlaces, run_batches, token_rows
from profilers.text.batches import Batch
from runtime.engine.fitted_predictor import Predictor
from runtime.policies.base import Step
from runtime.session.session import Session


class RoutingProfile:
    """Counts of L layers of E experts.

    `use` [L, 2, E] int64 are the tokens that selected each expert, by phase; `share` [L, 2, E]
    float64 the sums of their routing weights, renormalised over the selected experts.
    `coactivation` and `entropy` have one entry per layer, over both phases.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.use = np.zeros((num_layers, len(PHASES), num_experts), np.int64)
        self.share = np.zeros(self.use.shape, np.float64)
        self.coactivation = [Coactivation(num_experts) for _ in range(num_layers)]
        self.entropy = [EntropyHistogram() for _ in range(num_layers)]

    def update(self, step: Step, is_decode: np.ndarray) -> None:
        """Add one step; `is_decode` [T] bool."""
        phase = np.repeat(is_decode.astype(np.int64), step.selected.shape[1])
        use = self.use[step.layer]
        cell = phase * use.shape[1] + step.selected.ravel()
        share = additive_shares(step.weights).ravel()
        use += np.bincount(cell, minlength=use.size).reshape(use.shape)
        self.share[step.layer] += np.bincount(cell, share, use.size).reshape(use.shape)
        self.coactivation[step.layer].update(step.selected, step.weights)
        self.entropy[step.layer].update(token_entropy(step.weights))

    def merge(self, other: "RoutingProfile") -> None:
        """Add another shard's counts."""
        self.use += other.use
        self.share += other.share
        for mine, theirs in zip(
            self.coactivation + self.entropy, other.coactivation + other.entropy, strict=True
        ):
            mine.merge(theirs)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all counts by name, as the file of a half-done profile holds them."""
        return {
            "use": self.use,
            "share": self.share,
            "pairs": np.stack([layer.pairs for layer in self.coactivation]),
            "weighted": np.stack([layer.weighted for layer in self.coactivation]),
            "entropy": np.stack([layer.counts for layer in self.entropy]),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "RoutingProfile":
        """Return the profile that `arrays` were made from."""
        num_layers, _, num_experts = arrays["use"].shape
        profile = cls(num_layers, num_experts)
        profile.use = arrays["use"].copy()
        profile.share = arrays["share"].copy()
        for layer, counts in enumerate(profile.coactivation):
            counts.pairs = arrays["pairs"][layer].copy()
            counts.weighted = arrays["weighted"][layer].copy()
            profile.entropy[layer].counts = arrays["entropy"][layer].copy()
        return profile


@dataclass(frozen=True, slots=True)
class RoutingForesight:
    """Predictions that a kept trace holds for each layer's input: of the routers of the next
    `distance` layers and, if given, of a fitted predictor for as many layers as it has."""

    distance: int = 1
    predictor: Predictor | None = None


def observe(
    session: Session,
    batches: Iterable[Batch],
    *,
    prefill: int,
    profile: RoutingProfile,
    keep_trace: RoutingForesight | None = None,
) -> Iterator[tuple[Batch, Trace | None]]:
    """Run batches through the session's engine, add their routing to `profile`, and yield each
    batch when done.

    Positions below `prefill` count as prefill, the others as decode. With `keep_trace` each batch
    comes with its trace: prefill and decode passes, the routers' probabilities, the embeddings of
    each pass, and the predictions for the layers ahead.
    """
    if keep_trace:
        session.watcher.see_predictions(keep_trace.distance, keep_trace.predictor)
        session.watcher.see_probabilities()
    collector = _Collector(profile, prefill, keep_trace is not None)
    hooks = [(session.opened.model.get_input_embeddings(), collector.embed)] if keep_trace else []
    for batch in run_batches(session, batches, collector, hooks):
        yield batch, collector.trace(batch.first) if keep_trace else None


class _Collector:
    """Adds the engine's steps to a profile and, for a trace, keeps them and the inputs of the
    pass."""

    def __init__(self, profile: RoutingProfile, prefill: int, keep_trace: bool) -> None:
        self._profile = profile
        self._prefill = prefill
        self._keep_trace = keep_trace

    def begin_batch(self, rows: np.ndarray) -> None:
        self._rows = rows

    def begin_pass(self, requests: np.ndarray) -> None:
        self._tokens = TokenPlaces.of(requests, self._prefill)
        self._is_decode = self._tokens.position >= self._prefill
        self._steps: list[Step] = []

    def embed(self, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        self._embedded = token_rows(output, self._rows)

    def add(self, step: Step) -> None:
        self._profile.update(step, self._is_decode)
        if self._keep_trace:
            self._steps.append(step)

    def trace(self, first_request: int) -> Trace:
        """Return the last batch as requests in order: pass 0 is the prefill, each later token a
        pass of its own."""
        tokens = self._tokens
        steps = self._steps
        trace = Trace(
            request=_for_layers(steps, tokens.request + first_request, np.int32),
            pass_=_for_layers(steps, tokens.iteration, np.int32),
            phase=_for_layers(steps, self._is_decode, np.uint8),
            layer=np.repeat([step.layer for step in steps], len(tokens.request)).astype(np.int32),
            token=_for_layers(steps, tokens.position, np.int32),
            experts=np.concatenate([step.selected for step in steps]).astype(np.uint16),
            weights=np.concatenate([step.weights for step in steps]).astype(np.float32),
            probabilities=np.concatenate([step.probabilities for step in steps]),
            predicted=_concatenated([step.predicted for step in steps]),
            learned=_concatenated([step.learned for step in steps]),
            iteration=_for_layers(
                steps, np.append(0, tokens.ends_iteration[:-1].cumsum()), np.int32
            ),
            embeddings=mean_rows(self._embedded, np.flatnonzero(tokens.ends_iteration)),
        )
        return trace.take(np.lexsort((trace.token, trace.layer, trace.pass_, trace.request)))


def _for_layers(steps: list[Step], column: np.ndarray, dtype: type) -> np.ndarray:
    """Repeat a column [T] for each step."""
    return np.tile(column, len(steps)).astype(dtype)


def _concatenated(parts: list[np.ndarray | None]) -> np.ndarray | None:
    """Concatenate the parts of all steps; None where steps have none."""
    return None if parts[0] is None else np.concatenate(parts)
