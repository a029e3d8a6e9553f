"""Fits predictors of the layers ahead to a model's own routers, and measures their recall on
held-out text.

One teacher-forced pass over a sequence gives every token's router inputs; a layer ahead of the last
one is a layer of the next token. Only sums of products are kept of the text, so memory does not
grow with it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from artifacts.errors import BadInput, BadUsage
from artifacts.routing.predictors import COMMAND, TABLE, Predictors, predictor_rows
from artifacts.store.runs import ModelInfo
from artifacts.store.store import add_run
from profilers.routing.predictor_fit import PredictorTest, RidgeFit, RouterBatch, tuned_weights
from profilers.routing.teacher_forced import Hook, run_batches
from profilers.text.batches import Batch, Batching, Data
from profilers.text.run import TextRun
from runtime.engine.router_ahead import reason_not_asked
from runtime.policies.base import Step
from runtime.session.session import Session

# shares of the tokens that choose targets and that test
_TUNED = 0.1
_TESTED = 0.2


@dataclass(frozen=True, slots=True)
class PredictorPlan:
    """Predictors of distances 1 to `distance` on `features` random features beside the router's
    input."""

    distance: int = 3
    features: int = 512

    def __post_init__(self) -> None:
        if self.distance < 1 or self.features < 0:
            raise BadUsage("predictors need distance >= 1 and features >= 0")


@dataclass(frozen=True, slots=True, eq=False)
class FittedPredictors:
    """Predictors, and recall@k on the test text, [L, D] each, by name: of the predictors and of the
    controls."""

    run_id: int
    predictors: Predictors
    target: np.ndarray  # [L, D] of TARGETS
    recalls: dict[str, np.ndarray]
    num_tokens: int
    num_tested: int
    seconds: float
    shortfall: str = ""  # as in `Data`


def build_predictors(
    session: Session,
    data: Data,
    batching: Batching,
    plan: PredictorPlan,
    *,
    model: ModelInfo,
    store_path: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FittedPredictors:
    """Fit on the first seven tenths of the text, choose targets on the next tenth, test on the
    rest, write the run.

    Raises BadUsage for a distance beyond the model's layers, BadInput for too little text.
    """
    run = TextRun(data)
    shape = session.opened.shape
    if plan.distance > shape.num_layers:
        raise BadUsage(
            f"the distance must be 1 to {shape.num_layers}, the model's MoE layers, not "
            f"{plan.distance}"
        )
    fitting, tuning, testing = _parts(batching.batches(data.sequences))
    text = _Text(session, plan.distance, lambda done: progress(done, data.num_tokens))
    fit = RidgeFit(shape, distance=plan.distance, num_features=plan.features, seed=data.seed)
    for batch in text.observed(fitting):
        fit.add(batch)
    weights, target = tuned_weights(fit, text.observed(tuning))
    test = PredictorTest(fit)
    for batch in text.observed(testing):
        test.add(batch, weights)
    predictors = Predictors(fit.scale, weights, plan.features, data.seed)
    recalls = test.recalls()
    info = run.info(COMMAND, model, {**asdict(plan), **asdict(batching), "tested": test.num_tokens})
    rows = predictor_rows(predictors, _columns(target, recalls, fit.num_samples))
    run_id = add_run(store_path, info, {TABLE: rows}, model=model)
    counted = (data.num_tokens, test.num_tokens, info.seconds, data.shortfall)
    return FittedPredictors(run_id, predictors, target, recalls, *counted)


def _columns(
    target: np.ndarray, recalls: Mapping[str, np.ndarray], num_samples: int
) -> dict[str, np.ndarray]:
    """Return the columns of the store beside the weights, [L, D] each."""
    return {
        "target": target,
        "recall": recalls["learned"],
        "next_gate_recall": recalls["next_gate"],
        "frequent_recall": recalls["most frequent"],
        "samples": np.broadcast_to(num_samples, target.shape),
    }


def _parts(batches: Sequence[Batch]) -> tuple[Sequence[Batch], Sequence[Batch], Sequence[Batch]]:
    """Divide the batches by shares of the tokens: to fit, to choose, to test. Raises BadInput for
    too few batches."""
    if len(batches) < 3:
        raise BadInput(
            f"{len(batches)} batches of text are too few: give more tokens or a smaller --batch"
        )
    ends = np.cumsum([batch.num_tokens for batch in batches])
    cuts = ends.searchsorted(ends[-1] * np.array([1 - _TUNED - _TESTED, 1 - _TESTED]), side="right")
    first = int(np.clip(cuts[0], 1, len(batches) - 2))
    second = int(np.clip(cuts[1], first + 1, len(batches) - 1))
    return batches[:first], batches[first:second], batches[second:]


class _Text:
    """Observes the text part by part; `progress` is told the tokens done so far, of all parts
    together."""

    def __init__(self, session: Session, distance: int, progress: Callable[[int], None]) -> None:
        self._session = session
        self._distance = distance
        self._progress = progress
        self._num_done = 0

    def observed(self, batches: Sequence[Batch]) -> Iterator[RouterBatch]:
        for batch, observed in observe_inputs(self._session, batches, self._distance):
            yield observed
            self._num_done += batch.num_tokens
            self._progress(self._num_done)


def observe_inputs(
    session: Session, batches: Iterable[Batch], distance: int
) -> Iterator[tuple[Batch, RouterBatch]]:
    """Run batches through the session and yield each with its routers' inputs and logits, in order.
    Raises BadInput for a model whose routers cannot be asked ahead."""
    if reason := reason_not_asked(session.opened):
        raise BadInput(f"{reason}, and fitted predictors are compared with them")
    session.watcher.see_predictions(distance)
    collector = _Collector(session)
    hooks = [(layer.gate, collector.keep(layer.index)) for layer in session.opened.layers]
    for batch in run_batches(session, batches, collector, hooks):
        yield batch, collector.observed(batch)


class _Collector:
    """Keeps the routers' inputs and logits of a batch, and what the routers ahead say of the same
    inputs."""

    def __init__(self, session: Session) -> None:
        num_layers = session.opened.shape.num_layers
        self._inputs, self._logits, self._predicted = (
            [torch.empty(0)] * num_layers for _ in range(3)
        )

    def begin_batch(self, rows: np.ndarray) -> None:
        self._rows = np.flatnonzero(rows)

    def begin_pass(self, requests: np.ndarray) -> None:
        """Do nothing: no token's iteration is needed."""

    def keep(self, layer: int) -> Hook:
        def hook(gate: nn.Module, args: tuple, output: tuple) -> None:
            self._inputs[layer] = args[0].flatten(0, -2).float()
            self._logits[layer] = output[0].flatten(0, -2).float()

        return hook

    def add(self, step: Step) -> None:
        self._predicted[step.layer] = torch.from_numpy(step.predicted)

    def observed(self, batch: Batch) -> RouterBatch:
        device = self._inputs[0].device
        ends = np.cumsum([len(sequence) for sequence in batch.sequences]) - 1
        following = torch.from_numpy(np.setdiff1d(np.arange(len(self._rows)), ends)).to(device)
        rows = torch.from_numpy(self._rows).to(device)
        inputs, logits = (
            [layer[rows] for layer in layers] for layers in (self._inputs, self._logits)
        )
        return RouterBatch(
            inputs, logits, [layer.to(device) for layer in self._predicted], following
        )
