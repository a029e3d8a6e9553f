"""Ways of serving a step: as a live run does, and, in replays, with less protection from eviction,
as in SpecMD."""

from collections.abc import Mapping
from enum import StrEnum

import numpy as np

from artifacts.errors import BadUsage
from runtime.control.controller import Controller, distinct
from runtime.control.plan import Place, Plan, Wave
from runtime.control.transfers import Mover
from runtime.policies import Policies, describe
from runtime.policies.base import Step


class Service(StrEnum):
    """Way of serving a step.

    `pinned`, as in a live run: what the step wants is pinned and loaded, then prefetches are sent;
    none of the proposed keys is evicted for another. `unprotected`: the same, but proposed keys may
    be evicted for others. `one_by_one`: as `OneByOneController` does.
    """

    PINNED = "pinned"
    UNPROTECTED = "unprotected"
    ONE_BY_ONE = "one_by_one"


class UnprotectedMover(Mover):
    """Evicts proposed keys for other proposed keys too."""

    def _victims_sparing(self, keys: list[int], pool_key: int, count: int) -> list[int]:
        return self._victims(pool_key, count)


class QueueMover(Mover):
    """Keeps proposed keys in a queue until there are bytes and a slot for them, first come, first
    served, and evicts proposed keys too."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self._waiting: dict[int, None] = {}  # keys in the order of their proposals

    def clear(self) -> None:
        super().clear()
        self._waiting.clear()

    def prefetch(self, proposed: np.ndarray) -> tuple[Place, ...]:
        """Queue the proposed keys, and send what the step has bytes and slots for."""
        self._waiting.update(dict.fromkeys(proposed.tolist()))
        loads = []
        cache = self.cache
        for key in list(self._waiting):
            if self.arrivals.room <= 0:
                break
            if not cache.states[key]:
                if not cache.room(key):
                    if not (victims := self._victims(key, 1)):
                        continue
                    self._leave(victims)
                loads.append(self._send(key, self._pieces.num_bytes((key,))))
            del self._waiting[key]
        if loads:
            self._note_prefetched(loads)
        return tuple(loads)


class UnprotectedController(Controller):
    """Serves a step as `unprotected`."""

    mover_kind = UnprotectedMover


class OneByOneController(Controller):
    """Serves a step as SpecMD's framework does (algorithm 1, appendix A.3): prefetches are
    submitted before the step's experts are served, to a queue that outlives the step; each expert
    is looked up, loaded and pinned by itself; every token of a step adds a window of bytes. What is
    absent is fetched."""

    mover_kind = QueueMover

    def step(self, step: Step) -> Plan:
        """Decide one layer of the current pass."""
        now = self.now
        mover = self.mover
        now.step += 1
        now.layer = step.layer
        weights = None
        if self._routing.reroutes:
            step = self._reroute(step)
            weights = step.weights
        first = step.layer * self.shape.num_experts
        keys = [first + expert for expert in distinct(step.selected)]
        mover.arrivals.lent = mover.arrivals.window * (len(step.selected) - 1)
        now.unserved = unserved = set(keys)
        self._eviction.used(keys, step, now)
        prefetches = mover.prefetch(self._proposed(step))
        waves = []
        for key in keys:
            waves.append(self._serve(key))
            unserved.discard(key)
        mover.end_step([])
        return Plan(
            step.layer, step.selected, weights, tuple(waves), (), (), prefetches, is_ahead=True
        )

    def _serve(self, key: int) -> Wave:
        """Return the wave of one expert, which is pinned for no longer."""
        present, missing = ([key], []) if self.cache.states[key] else ([], [key])
        self._count(self.now.layer, [key], missing)
        [wave], pinned = self.mover.waves(present, missing, {})
        self.cache.unpin(pinned)
        return wave


_CONTROLLERS: Mapping[Service, type[Controller]] = {
    Service.PINNED: Controller,
    Service.UNPROTECTED: UnprotectedController,
    Service.ONE_BY_ONE: OneByOneController,
}


def controller_kind(serving: str, policies: Policies) -> type[Controller]:
    """Return the controller that serves this way. Raises BadUsage for an unknown way, and for one
    by one with policies that do anything but fetch whole experts when they are absent."""
    if serving not in list(Service):
        raise BadUsage(f"--serving is {', '.join(Service)}, not {serving!r}")
    if serving == Service.ONE_BY_ONE:
        if policies.miss.chooses:
            raise BadUsage(
                "--serving one_by_one fetches what is absent: leave out --miss "
                f"{describe(policies.miss)}"
            )
        if policies.residency.cuts or policies.residency.places:
            named = describe(policies.residency)
            raise BadUsage(
                f"--serving one_by_one has whole experts come and go: leave out --residency {named}"
            )
    return _CONTROLLERS[Service(serving)]
