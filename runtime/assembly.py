"""Puts a controller together from policies, the same for a live run and for a replay."""

from artifacts.errors import Incompatible
from artifacts.shape import Shape
from runtime.cache import Cache, Scope
from runtime.controller import Controller
from runtime.policies import POLICIES, Policies
from runtime.policies.base import Artefacts

_STORED = "which the store does not hold: "
_REMEDY = {
    "buddies": _STORED + "run `moectl profile`, then `moectl build-buddies`",
    "entropy": _STORED + "run `moectl profile`",
    "next_use": "the future of a trace: it runs in the simulator only, with `moectl simulate`",
    "replicas": "which no command builds yet: it runs in the simulator only, with `moectl simulate`",
}


def check_required(policies: Policies, artefacts: Artefacts) -> None:
    """Raise Incompatible, with the command that mends it, when a policy lacks an artefact."""
    for axis in POLICIES:
        for need in sorted(getattr(policies, axis).requires):
            if getattr(artefacts, need) is None:
                raise Incompatible(f"the {axis} policy needs {need}, {_REMEDY[need]}")


def build_controller(
    policies: Policies, shape: Shape, *, num_slots: int, scope: Scope, window: int, artefacts: Artefacts
) -> Controller:
    """`num_slots` experts fit the fast tier; `window` bytes may be prefetched per step."""
    check_required(policies, artefacts)
    for axis in POLICIES:
        getattr(policies, axis).prepare(shape, artefacts)
    return Controller(
        Cache(shape, policies.residency.capacities(num_slots, shape), scope),
        routing=policies.routing,
        eviction=policies.eviction,
        miss=policies.miss,
        prefetch=policies.prefetch,
        window=window,
    )
