"""Recorded routing of real models: what papers say of routing itself, and hit rates of evictions.

Shapes: R requests, B resamplings of them (`intervals`), L layers, E experts. A figure of resampled
requests is [B], the first of all of them once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from artifacts.errors import BadInput
from artifacts.modelshapes.known import MODELS
from artifacts.routing.coactivation import Coactivation, conditional
from artifacts.shape import Shape
from artifacts.traces.next_use import NextUse
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import Trace
from moectl.bundled import bundled_trace
from runtime.control.build import build_controller
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope, preset
from runtime.replay.replay import replay
from tools.bench.traces.real import first_passes
from tools.reproductions.intervals import resampled

BUNDLED = "gpt-oss-20b"


@dataclass(frozen=True)
class Recorded:
    """A trace with requests one after the other, a token a pass, and the name of its file."""

    name: str
    trace: Trace

    @classmethod
    def read(cls, path: Path | None = None, *, tokens: int = 10**9) -> "Recorded":
        """Read the file's first tokens, by default the bundled trace's. Raises BadInput."""
        path = path or Path(BUNDLED)
        bundled = bundled_trace(path)
        return cls(
            f"{path} (bundled)" if bundled else path.stem,
            first_passes(read_parquet(bundled or path), tokens, apart=True),
        )

    @classmethod
    def of_model(cls, path: Path, model: str) -> "Recorded":
        """Read a trace of that model. Raises BadInput for one with other experts."""
        recorded = cls.read(path)
        wanted = MODELS[model].shape.num_experts
        if recorded.shape.num_experts != wanted:
            raise BadInput(
                f"{path} has {recorded.shape.num_experts} experts a layer: give a trace of "
                f"{model}, which has {wanted}"
            )
        return recorded

    @cached_property
    def shape(self) -> Shape:
        """Of the trace, an expert one byte."""
        num_experts = int(self.trace.experts.max()) + 1
        return Shape(self.trace.num_layers, num_experts, self.trace.top_k, 1)

    @cached_property
    def units(self) -> np.ndarray:
        """The request of each row, from 0."""
        return np.unique(self.trace.request, return_inverse=True)[1]

    @cached_property
    def weights(self) -> np.ndarray:
        return resampled(int(self.units.max()) + 1)

    @property
    def told(self) -> str:
        tokens = int((self.trace.layer == 0).sum())
        shape = self.shape
        return (
            f"recorded routing {self.name}: {tokens:,} tokens of {len(self.weights[0])} requests, "
            f"{shape.num_layers} layers, {shape.top_k} of {shape.num_experts} experts"
        )

    def hits(self, eviction: str, held: int) -> tuple[np.ndarray, list[float]]:
        """Return hit rates [B] of loading on demand with `held` experts a layer, from empty; and of
        each layer."""
        controller = build_controller(
            build(preset("on-demand").texts() | {"eviction": eviction}),
            self.shape,
            num_slots=held * self.shape.num_layers,
            scope=Scope.LAYER,
            window=0,
            artefacts=Artefacts(next_use=self._future if eviction == "belady" else None),
        )
        replay(self.trace, controller)
        by_pass = np.array(controller.counters.hits_by_pass())
        of_pass = np.zeros(len(by_pass), np.int64)
        of_pass[self.trace.pass_indices()] = self.units
        hits, asked = (
            self.weights @ np.bincount(of_pass, column, self.weights.shape[1])
            for column in by_pass.T
        )
        layers = controller.counters.by_layer()
        return hits / asked, [layer["hits"] / layer["requests"] for layer in layers]

    @cached_property
    def _future(self) -> NextUse:
        return NextUse.of(self.trace, self.shape)

    def static_sets(self, held: int, *, num_sets: int = 50) -> np.ndarray:
        """Return hit rates [B] of sets of experts drawn once a layer, the mean of several."""
        places = np.random.default_rng(0).random((num_sets, *self.uses.shape[1:])).argsort(axis=-1)
        inside = np.stack([(self.uses * (one < held)).sum(axis=(1, 2)) for one in places]).mean(0)
        return (self.weights @ inside) / (self.weights @ self.uses.sum(axis=(1, 2)))

    @cached_property
    def uses(self) -> np.ndarray:
        """How often each request selected each expert, [R, L, E]."""
        return self._counted(np.ones(len(self.trace), bool))

    def _counted(self, rows: np.ndarray) -> np.ndarray:
        shape = self.shape
        sizes = (self.weights.shape[1], shape.num_layers, shape.num_experts)
        cells = (self.units * shape.num_layers + self.trace.layer)[rows, None] * shape.num_experts
        return np.bincount(
            (cells + self.trace.experts[rows]).ravel().astype(np.int64), minlength=np.prod(sizes)
        ).reshape(sizes)

    def likeness(self, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines of the uses in a request's first tokens with those in its rest, mean over
        layers [B]; and the same with the rest of the next request. Requests of fewer than twice
        `first` tokens are left out."""
        early = self._counted(self._places < first).astype(float)
        rest = self._counted(self._places >= first).astype(float)
        is_long = rest.sum(axis=(1, 2)) >= early.sum(axis=(1, 2))
        early = early[is_long]
        rest = rest[is_long]
        weights = resampled(len(rest))
        early, rest = (
            one / np.maximum(np.linalg.norm(one, axis=-1, keepdims=True), 1e-9)
            for one in (early, rest)
        )
        own, other = (
            (early * one).sum(axis=-1).mean(axis=1) for one in (rest, np.roll(rest, 1, axis=0))
        )
        return tuple(weights @ one / weights.sum(axis=1) for one in (own, other))

    @cached_property
    def _places(self) -> np.ndarray:
        """The number of each row's token in its request."""
        passes = self.trace.pass_indices()
        first = np.full(self.weights.shape[1], passes.max())
        np.minimum.at(first, self.units, passes)
        return passes - first[self.units]

    @property
    def busiest(self) -> float:
        """The share of its selections that a layer's busiest quarter of experts has, the mean."""
        uses = np.sort(self.uses.sum(axis=0), axis=1)[:, ::-1]
        quarter = self.shape.num_experts // 4
        return float((uses[:, :quarter].sum(axis=1) / uses.sum(axis=1)).mean())

    def by_layer(self, figure: Callable[[np.ndarray], float], *, mixed: bool = False) -> np.ndarray:
        """Return a figure of q [E, E], the share of each peer in an expert's co-activation, by
        layer [L]. `mixed`: selected together at random, each expert as often as recorded."""
        return np.array(
            [figure(self._peers(layer, mixed)) for layer in range(self.shape.num_layers)]
        )

    def parts(self, number: int = 3) -> "list[Recorded]":
        """Return the trace in parts of as many requests each: as the seeds of a synthetic one."""
        return [
            Recorded(self.name, self.trace.take(np.isin(self.units, some)))
            for some in np.array_split(np.unique(self.units), number)
        ]

    def _peers(self, layer: int, mixed: bool) -> np.ndarray:
        chosen = self.trace.experts[self.trace.layer == layer].astype(int)
        if mixed:
            chosen = _mixed(chosen, np.random.default_rng(layer))
        counts = Coactivation(self.shape.num_experts)
        counts.update(chosen, np.ones(chosen.shape))
        return conditional(counts.pairs)


def _mixed(chosen: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return rows of distinct experts [T, k], each expert as often as in `chosen` but for a few
    rows where no exchange was found: selections of any two rows are exchanged at random."""
    mixed = chosen.copy()
    for _ in range(20):
        partner = random.permutation(len(mixed))
        ours, theirs = partner[: len(mixed) // 2 * 2].reshape(2, -1)
        column, other = random.integers(0, mixed.shape[1], (2, len(ours)))
        given = mixed[ours, column]
        taken = mixed[theirs, other]
        is_free = ~(mixed[ours] == taken[:, None]).any(1) & ~(mixed[theirs] == given[:, None]).any(
            1
        )
        mixed[ours[is_free], column[is_free]] = taken[is_free]
        mixed[theirs[is_free], other[is_free]] = given[is_free]
    return mixed


def peers_for(q: np.ndarray, share: float = 0.75) -> float:
    """Return how many peers hold this share of an expert's co-activation, the mean."""
    used = q[q.sum(axis=1) > 0]
    held = np.cumsum(np.sort(used, axis=1)[:, ::-1], axis=1)
    return float(((held < share - 1e-9).sum(axis=1) + 1).mean())


def evenness(q: np.ndarray) -> float:
    """Return the mean entropy of an expert's peers over that of even ones."""
    used = q[q.sum(axis=1) > 0]
    logs = np.log(np.where(used > 0, used, 1))
    return float(-(used * logs).sum(axis=1).mean() / np.log(q.shape[1] - 1))


def rank_correlation(values: np.ndarray) -> float:
    """Return Spearman's correlation of the values with their place."""
    ranks = np.argsort(np.argsort(values))
    return float(np.corrcoef(np.arange(len(values)), ranks)[0, 1])
