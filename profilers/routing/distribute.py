"""Batches of a profile as tasks: whoever can read the checkpoint counts them, and they count the same wherever."""

import pickle
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from artifacts.errors import Incompatible
from artifacts.traces.trace import Trace
from profilers.routing.observe import Foresight, RoutingProfile, observe
from profilers.text.batches import Batch
from profilers.workers.workers import Executor
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session, Settings

_TURNS, _MOST = 4, 64  # tasks of a worker, at least, where there is as much to do; batches of a task, at most

Part = tuple[int, ...]  # numbers of batches


@dataclass(frozen=True, slots=True)
class Counted:
    """What the routers said in some batches: `arrays` of a RoutingProfile, and their traces where those are kept."""

    part: Part
    arrays: Mapping[str, np.ndarray]
    traces: tuple[Trace | None, ...]


class Counting:
    """The work of a worker: it opens the model with its first task, and computes on one thread."""

    def __init__(
        self, name: str, opened: MoeModel, settings: Settings, prefill: int, keep_trace: Foresight | None
    ) -> None:
        self._name = str(Path(name).resolve()) if Path(name).exists() else name
        self._fingerprint, self._prefill = opened.fingerprint, prefill
        self._settings = replace(settings, device="cpu", threads=1)
        self._keep_trace = pickle.dumps(keep_trace)  # or processes of one machine would share its tensors' memory
        self._session: Session | None = None

    def __call__(self, task: tuple[Part, Sequence[Batch]]) -> Counted:
        """Raises Incompatible where the name leads to another model than it does for who gives the task."""
        part, batches = task
        session = self._opened()
        profile = RoutingProfile(session.opened.shape.num_layers, session.opened.shape.num_experts)
        keep_trace = pickle.loads(self._keep_trace)
        running = observe(session, batches, prefill=self._prefill, profile=profile, keep_trace=keep_trace)
        traces = tuple(trace for _, trace in running)
        return Counted(part, profile.arrays(), traces)

    def _opened(self) -> Session:
        if self._session is None:
            opened = open_model(self._name)
            if opened.fingerprint != self._fingerprint:
                raise Incompatible(
                    f"on {socket.gethostname()} {self._name} is another model: every node needs the same checkpoint "
                    "under the same name"
                )
            self._session = Session(opened, self._settings)
        return self._session


def parts(missing: Sequence[int], executor: Executor, *, is_traced: bool) -> list[Part]:
    """The batches as tasks: several at a time where they are many, one where their traces come with them."""
    size = 1 if is_traced else min(_MOST, max(1, len(missing) // (_TURNS * executor.count)))
    return [tuple(missing[start : start + size]) for start in range(0, len(missing), size)]
