"""Observes requests iteration by iteration and selects the iterations to store as expert maps
(fMoE).

A sequence is a request: its prompt is iteration 0, every later token an iteration of its own.
Memory is bounded by the maps and the iterations of one batch.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from artifacts.routing.expert_maps import DTYPES, ExpertMaps, mean_rows
from artifacts.store.expert_maps import COMMAND, TABLE, map_rows
from artifacts.store.runs import ModelInfo
from artifacts.store.store import add_run
from profilers.routing.teacher_forced import TokenPlaces, run_batches, token_rows
from profilers.text.batches import Batch, Batching, Data
from profilers.text.run import TextRun
from runtime.policies.base import Step
from runtime.session.session import Session


@dataclass(frozen=True, slots=True)
class Iterations:
    """Embeddings and routing probabilities of I iterations."""

    request: np.ndarray  # [I] int
    iteration: np.ndarray  # [I] int, 0 the prompt
    embeddings: np.ndarray  # [I, H] float32, mean over the iteration's tokens
    probabilities: np.ndarray  # [I, L, E] float32, mean over the iteration's tokens


@dataclass(frozen=True, slots=True)
class ExpertMapPlan:
    """The size of the map store, the prefetch distance of the search, and the type that maps are
    stored in."""

    capacity: int = 1000
    distance: int = 3
    dtype: str = DTYPES[0]


@dataclass(frozen=True, slots=True)
class BuiltMaps:
    """The maps of a run, and the number of requests, iterations and tokens that they were selected
    from."""

    run_id: int
    maps: ExpertMaps
    num_requests: int
    num_iterations: int
    num_tokens: int
    seconds: float
    shortfall: str = ""  # as in `Data`


def build_maps(
    session: Session,
    data: Data,
    batching: Batching,
    plan: ExpertMapPlan,
    *,
    model: ModelInfo,
    store_path: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> BuiltMaps:
    """Run the requests, fill a store of maps and write it. `progress` is told the tokens done and
    the tokens in all.

    Raises BadUsage for a distance beyond the model's layers or a capacity of zero.
    """
    run = TextRun(data)
    maps = _empty(session, plan)
    running = observe_iterations(
        session, batching.batches(data.sequences), prefill=batching.prefill
    )
    origins, num_iterations = _fill(maps, running, lambda done: progress(done, data.num_tokens))
    counts = {"iterations": num_iterations, "replaced": maps.num_replaced}
    info = run.info(COMMAND, model, {**asdict(plan), **asdict(batching), **counts})
    run_id = add_run(store_path, info, {TABLE: map_rows(maps, origins)}, model=model)
    counted = (len(data.sequences), num_iterations, data.num_tokens)
    return BuiltMaps(run_id, maps, *counted, info.seconds, data.shortfall)


def _fill(
    maps: ExpertMaps, running: Iterable[tuple[Batch, Iterations]], progress: Callable[[int], None]
) -> tuple[np.ndarray, int]:
    """Add all iterations in order. Returns the request and iteration of each map [N, 2], and the
    number of all."""
    origins = np.zeros((maps.capacity, 2), np.int64)
    num_iterations = num_tokens = 0
    for batch, iterations in running:
        rows = maps.add(iterations.embeddings, iterations.probabilities)
        for row, *origin in zip(rows, iterations.request, iterations.iteration, strict=True):
            origins[row] = origin  # the last of several iterations in one row
        num_iterations = num_iterations + len(rows)
        num_tokens = num_tokens + batch.num_tokens
        progress(num_tokens)
    return origins[: len(maps)], num_iterations


def observe_iterations(
    session: Session, batches: Iterable[Batch], *, prefill: int
) -> Iterator[tuple[Batch, Iterations]]:
    """Run batches through the session and yield each with its iterations, in order."""
    collector = _Collector(session, prefill)
    session.watcher.see_probabilities()
    hooks = [(session.opened.model.get_input_embeddings(), collector.embed)]
    for batch in run_batches(session, batches, collector, hooks):
        yield batch, collector.iterations(batch.first)


class _Collector:
    """Averages the routers' probabilities and the embeddings over the tokens of each iteration."""

    def __init__(self, session: Session, prefill: int) -> None:
        self._shape = session.opened.shape
        self._prefill = prefill

    def begin_batch(self, rows: np.ndarray) -> None:
        self._rows = rows

    def begin_pass(self, requests: np.ndarray) -> None:
        tokens = TokenPlaces.of(requests, self._prefill)
        self._last = np.flatnonzero(tokens.ends_iteration)
        self._request = tokens.request[self._last]
        self._iteration = tokens.iteration[self._last]
        size = (len(self._last), self._shape.num_layers, self._shape.num_experts)
        self._probabilities = np.empty(size, np.float32)

    def embed(self, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        self._embeddings = mean_rows(token_rows(output, self._rows), self._last)

    def add(self, step: Step) -> None:
        self._probabilities[:, step.layer] = mean_rows(step.probabilities, self._last)

    def iterations(self, first_request: int) -> Iterations:
        return Iterations(
            self._request + first_request, self._iteration, self._embeddings, self._probabilities
        )


def _empty(session: Session, plan: ExpertMapPlan) -> ExpertMaps:
    opened = session.opened
    return ExpertMaps(
        plan.capacity,
        num_layers=opened.shape.num_layers,
        num_experts=opened.shape.num_experts,
        hidden=opened.model.get_input_embeddings().weight.shape[1],
        distance=plan.distance,
        dtype=plan.dtype,
    )
