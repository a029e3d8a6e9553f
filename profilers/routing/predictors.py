"""Fits predictors of the layers ahead to a model's own routers, and says how good they are on text they never saw.

Text is teacher-forced, so that one pass over a sequence shows every token's router inputs; past the last layer the
token after it is meant. Sums of products are all that is kept of the text: ridge regression needs no more, and memory
does not grow with it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from artifacts.errors import BadInput, BadUsage
from artifacts.routing.predictors import COMMAND, TABLE, TARGETS, Predictors, predictor_rows
from artifacts.store.runs import ModelInfo, RunInfo, utc_now
from artifacts.store.store import add_run
from profilers.routing.predictor_fit import Fit, Seen, Tested, Tuning, choose
from profilers.text.batches import Batch, Batching, Data, check_sequences, padded, real_rows
from profilers.text.corpus import data_digest
from runtime.policies.base import Step
from runtime.session.session import Session

_TUNED, _TESTED = 0.1, 0.2  # shares of the tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """The predictors that are asked for: of distances 1..`distance`, on `features` random features."""

    distance: int = 3
    features: int = 512

    def __post_init__(self) -> None:
        if self.distance < 1 or self.features < 0:
            raise BadUsage("predictors need distance >= 1 and features >= 0")


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """Predictors, and what they are worth on the last batches: recall@k by predictor, [L, D] each, the controls
    included."""

    run_id: int
    predictors: Predictors
    target: np.ndarray  # [L, D] of TARGETS
    recalls: dict[str, np.ndarray]
    num_tokens: int
    num_tested: int
    seconds: float


def build_predictors(
    session: Session,
    data: Data,
    batching: Batching,
    plan: Plan,
    *,
    model: ModelInfo,
    store_path: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fitted:
    """Fit on the first 7 tenths of the text, choose on the next, test on the rest, and write the run.

    Raises BadUsage for a distance as long as the model, BadInput for too little text.
    """
    started_at, start_s = utc_now(), time.monotonic()
    shape = session.opened.shape
    if plan.distance > shape.num_layers:
        raise BadUsage(f"the distance must be 1 to {shape.num_layers}, the model's MoE layers, not {plan.distance}")
    fitting, tuning, testing = _parts(batching.batches(data.sequences))
    total, done = sum(map(len, data.sequences)), 0

    def seen(batches: Sequence[Batch]) -> Iterator[Seen]:
        nonlocal done
        for batch, inputs in observe_inputs(session, batches, plan.distance):
            yield inputs
            done += batch.num_tokens
            progress(done, total)

    fit = Fit(shape, distance=plan.distance, num_features=plan.features, seed=data.seed)
    for inputs in seen(fitting):
        fit.add(inputs)
    candidates = fit.solve()
    tuned = {target: Tuning(shape, plan.distance) for target in TARGETS}
    for inputs in seen(tuning):
        for name, found in tuned.items():
            found.add(inputs, fit, candidates[name])
    weights, target = choose(candidates, tuned)
    tested = Tested(shape, plan.distance, fit.use)
    for inputs in seen(testing):
        tested.add(inputs, fit, weights)
    predictors = Predictors(fit.scale, weights, plan.features, data.seed)
    recall, next_gate, frequent = tested.recalls()
    columns = {
        "target": target,
        "recall": recall,
        "next_gate_recall": next_gate,
        "frequent_recall": frequent,
        "samples": np.broadcast_to(fit.num_samples, recall.shape),
    }
    info = RunInfo(
        command=COMMAND,
        model_id=model.model_id,
        started_at=started_at,
        seconds=time.monotonic() - start_s,
        data=data.spec,
        data_digest=data_digest(data.sequences),
        tokens=total,
        seed=data.seed,
        parameters={**asdict(plan), **asdict(batching), "tested": tested.num_tokens},
    )
    run_id = add_run(store_path, info, {TABLE: predictor_rows(predictors, columns)}, model=model)
    chance = np.full(recall.shape, shape.top_k / shape.num_experts)
    recalls = {"learned": recall, "next_gate": next_gate, "most frequent": frequent, "random": chance}
    return Fitted(run_id, predictors, target, recalls, total, tested.num_tokens, info.seconds)


def _parts(batches: Sequence[Batch]) -> tuple[Sequence[Batch], Sequence[Batch], Sequence[Batch]]:
    """To fit on, to choose on, to test on, by their shares of the tokens. Raises BadInput when there are too few."""
    if len(batches) < 3:
        raise BadInput(f"{len(batches)} batches of text are too few: give more tokens or a smaller --batch")
    done = np.cumsum([batch.num_tokens for batch in batches])
    cuts = done.searchsorted(done[-1] * np.array([1 - _TUNED - _TESTED, 1 - _TESTED]), side="right")
    first = int(np.clip(cuts[0], 1, len(batches) - 2))
    second = int(np.clip(cuts[1], first + 1, len(batches) - 1))
    return batches[:first], batches[first:second], batches[second:]


def observe_inputs(session: Session, batches: Iterable[Batch], distance: int) -> Iterator[tuple[Batch, Seen]]:
    """Run batches through the session's watcher and yield each with its routers' inputs, in order."""
    collector, watcher = _Collector(session), session.watcher
    watcher.see_predictions(distance)
    watcher.on_step = collector.add
    handles = [layer.gate.register_forward_hook(collector.keep(layer.index)) for layer in session.opened.layers]
    try:
        for batch in batches:
            check_sequences(session.opened.model, batch.sequences)
            ids, mask = padded(batch.sequences)
            session.new_requests(len(batch.sequences))
            session.forward(ids, mask=mask)
            yield batch, collector.seen(batch, np.flatnonzero(real_rows(ids, mask)))
    finally:
        watcher.on_step = None
        for handle in handles:
            handle.remove()


class _Collector:
    """Hears what routers are given and say, and from the engine's steps what routers ahead would say."""

    def __init__(self, session: Session) -> None:
        empty = [torch.empty(0)] * session.opened.shape.num_layers
        self._inputs, self._logits, self._predicted = empty, list(empty), list(empty)

    def keep(self, layer: int) -> Callable:
        def hook(gate: nn.Module, args: tuple, output: tuple) -> None:
            self._inputs[layer] = args[0].flatten(0, -2).float()
            self._logits[layer] = output[0].flatten(0, -2).float()

        return hook

    def add(self, step: Step) -> None:
        self._predicted[step.layer] = torch.from_numpy(step.predicted)

    def seen(self, batch: Batch, rows: np.ndarray) -> Seen:
        device = self._inputs[0].device
        ends = np.cumsum([len(sequence) for sequence in batch.sequences]) - 1
        following = torch.from_numpy(np.setdiff1d(np.arange(len(rows)), ends)).to(device)
        real = torch.from_numpy(rows).to(device)
        inputs, logits = ([values[real] for values in kept] for kept in (self._inputs, self._logits))
        return Seen(inputs, logits, [values.to(device) for values in self._predicted], following)
