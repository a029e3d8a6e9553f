"""Divides the batches of a profile into tasks for workers, which open the checkpoint and count on
their own.

The counts do not depend on the worker.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from artifacts.traces.trace import Trace
from profilers.routing.observe import RoutingForesight, RoutingProfile, observe
from profilers.text.batches import Batch
from profilers.workers.same_model import SameModel
from profilers.workers.workers import Executor
from runtime.session.session import Session

_MIN_TASKS = 4  # for each worker, where there are enough batches
_MAX_BATCHES = 64  # of a task

Part = tuple[int, ...]  # numbers of batches


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts of some batches: `arrays` of a RoutingProfile, and a trace for each batch where
    traces are kept."""

    part: Part
    arrays: Mapping[str, np.ndarray]
    traces: tuple[Trace | None, ...]


class Counting:
    """The work of a worker: counts the batches of a task on one thread. The first task opens the
    model."""

    def __init__(
        self, name: str, session: Session, prefill: int, keep_trace: RoutingForesight | None
    ) -> None:
        self._model = SameModel.of(name, session.opened)
        self._prefill = prefill
        self._settings = replace(session.parts.settings, device="cpu", threads=1)
        self.is_traced = keep_trace is not None
        # pickled now, or processes would share the memory of its tensors
        self._keep_trace = pickle.dumps(keep_trace)
        self._session: Session | None = None

    def __call__(self, task: tuple[Part, Sequence[Batch]]) -> Counted:
        """Count a task. Raises Incompatible where the name leads to another model than in the
        process that submits."""
        part, batches = task
        session = self._opened()
        profile = RoutingProfile(session.opened.shape.num_layers, session.opened.shape.num_experts)
        keep_trace = pickle.loads(self._keep_trace)
        running = observe(
            session, batches, prefill=self._prefill, profile=profile, keep_trace=keep_trace
        )
        traces = tuple(trace for _, trace in running)
        return Counted(part, profile.arrays(), traces)

    def _opened(self) -> Session:
        if self._session is None:
            self._session = Session(self._model.open(), self._settings)
        return self._session


def parts(missing: Sequence[int], executor: Executor, *, is_traced: bool) -> list[Part]:
    """Divide the batches into tasks: of several batches where there are many, of one where traces
    are kept."""
    size = (
        1 if is_traced else min(_MAX_BATCHES, max(1, len(missing) // (_MIN_TASKS * executor.count)))
    )
    return [tuple(missing[start : start + size]) for start in range(0, len(missing), size)]
