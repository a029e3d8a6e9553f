"""Builds a controller from policies, the same for a live run and for a replay."""

from dataclasses import replace

import numpy as np

from artifacts.errors import BadUsage, Incompatible
from artifacts.hardware.machines import HERE
from artifacts.shape import FULL_BITS, Shape
from runtime.control import sizes
from runtime.control.cache import Cache
from runtime.control.controller import Controller
from runtime.control.pools import Partitions, Pool, check_each_has_a_slot, whole_experts
from runtime.control.segments import Segments, Whole, segment_pools
from runtime.control.serving import Service, controller_kind
from runtime.policies import POLICIES, Policies, describe
from runtime.policies.base import REMEDY, Artefacts, FastTier, Split
from runtime.policies.presets import Scope
from runtime.policies.shared.maps import Matching


def check_required(policies: Policies, artefacts: Artefacts) -> None:
    """Raise Incompatible, with the command that mends it, when a policy lacks an artefact."""
    for axis in POLICIES:
        for need in sorted(getattr(policies, axis).requires):
            if getattr(artefacts, need) is None:
                raise Incompatible(f"the {axis} policy needs {need}, {REMEDY[need]}")
            if need == "replicas" and not artefacts.replicas.widths:
                base = artefacts.replicas.base
                than = (
                    "smaller than the checkpoint's experts"
                    if base == FULL_BITS
                    else f"below a base of {base} bits"
                )
                raise Incompatible(f"the {axis} policy needs replicas {than}, {REMEDY[need]}")


def prepare(policies: Policies, shape: Shape, artefacts: Artefacts) -> None:
    """Prepare every policy for the first step. Raises Incompatible when a policy lacks an
    artefact."""
    check_required(policies, artefacts)
    if "maps" in policies.requires:
        matching = Matching(artefacts.maps, shape, learns=artefacts.learns_maps)
        artefacts = replace(artefacts, matching=matching)
    for axis in POLICIES:
        getattr(policies, axis).prepare(shape, artefacts)


def fast_tier(
    policies: Policies,
    shape: Shape,
    budget: str,
    *,
    scope: Scope,
    artefacts: Artefacts,
    machine: str = HERE,
    link: str | None = None,
    num_devices: int = 1,
) -> FastTier:
    """Return what a budget holds: slots, and the replicas that the residency policy keeps resident
    beside them.

    Raises BadUsage for a budget that is not understood or too small. Raises Incompatible when a
    policy lacks an artefact, or when the artefact was made for another machine or budget.
    """
    prepare(policies, shape, _made_for(machine, link, artefacts, policies))
    if shared := policies.residency.share(sizes.budget_nbytes(budget, shape)):
        return shared
    is_per_layer = scope is Scope.LAYER
    return FastTier(sizes.num_slots(budget, shape, per_layer=is_per_layer, num_devices=num_devices))


def _made_for(
    machine: str, link: str | None, artefacts: Artefacts, policies: Policies
) -> Artefacts:
    """Keep only the splits made for this machine, and for this link if one is given. Raises
    Incompatible when a split is required and the store has only others."""
    if not artefacts.splits:
        return artefacts
    fitting = tuple(split for split in artefacts.splits if split.fits(machine, link))
    if not fitting and "splits" in policies.requires:
        others = ", ".join(sorted({split.made_for for split in artefacts.splits}))
        named = "" if machine == HERE else f" --machine {machine}"
        wanted = f"{machine} over {link}" if link else machine
        raise Incompatible(
            f"the store's splits were made for another machine ({others}, not {wanted}): run "
            f"`moectl split{named}`"
        )
    return replace(artefacts, splits=fitting)


def pools(
    policies: Policies,
    shape: Shape,
    *,
    num_slots: int,
    scope: Scope,
    split: Split | None = None,
    partitions: Partitions,
) -> tuple[Pool, ...]:
    """Divide the slots of a fast tier into pools. Raises BadUsage for a split that contradicts the
    scope, and when there are too few slots for the devices."""
    is_global = scope is Scope.GLOBAL
    if split is not None:
        shared = segment_pools(shape, split, is_global=is_global, partitions=partitions)
    else:
        capacities = partitions.evened(policies.residency.capacities(num_slots, shape))
        shared = whole_experts(shape, partitions.dealt(capacities), is_global=is_global)
    if not policies.miss.reads_shadows:
        check_each_has_a_slot(shared)
    return shared


def lay_out(
    controller: Controller, policies: Policies, fast: FastTier, scope: Scope
) -> tuple[Pool, ...]:
    """Move a controller of split experts to another fast tier, which is empty. Returns its
    pools."""
    common = {"scope": scope, "split": fast.split, "partitions": controller.cache.partitions}
    shared = pools(policies, controller.shape, num_slots=fast.num_slots, **common)
    controller.lay_out(fast.split, shared)
    return shared


def build_controller(
    policies: Policies,
    shape: Shape,
    *,
    num_slots: int,
    scope: Scope,
    window: int,
    artefacts: Artefacts,
    shadows: np.ndarray | None = None,
    split: Split | None = None,
    num_devices: int = 1,
    serving: str = str(Service.PINNED),
) -> Controller:
    """Build the controller of a fast tier that fits `num_slots` experts, or segments by `split`,
    and the resident replicas `shadows` [L * E] bits if given.

    `window` bytes may be prefetched per step. Slots and experts are spread over `num_devices`.
    """
    partitions = Partitions(shape.num_experts, num_devices)
    prepare(policies, shape, replace(artefacts, hops=partitions.hops))
    _check_combination(policies, shadows=shadows, split=split)
    pieces = Whole(shape) if split is None else Segments(shape, split)
    shared = pools(
        policies, shape, num_slots=num_slots, scope=scope, split=split, partitions=partitions
    )
    if shadows is not None:
        _check_loads_have_slots(policies, shared)
    replicas = artefacts.replicas if "replicas" in policies.requires else None
    return controller_kind(serving, policies)(
        Cache(shape, shared, shares=pieces.shares, shadows=shadows, partitions=partitions),
        **{axis: getattr(policies, axis) for axis in POLICIES},
        window=window,
        nbytes=replicas.nbytes if replicas else {FULL_BITS: shape.expert_nbytes},
        pieces=pieces,
    )


def _check_combination(
    policies: Policies, *, shadows: np.ndarray | None, split: Split | None
) -> None:
    """Raise BadUsage when one policy needs what another axis does not provide."""
    if policies.routing.follows_predictions and not policies.prefetch.reads_predictions:
        raise BadUsage(
            f"--routing {describe(policies.routing)} follows predictions: give --prefetch "
            "next_gate too"
        )
    if policies.miss.reads_shadows and shadows is None:
        raise BadUsage(
            f"--miss {describe(policies.miss)} computes on replicas that stay: give --residency "
            "shadow too"
        )
    assert policies.residency.cuts == (split is not None), (
        f"{describe(policies.residency)} with split {split}"
    )
    if split is not None and "replicas" in policies.requires:
        raise BadUsage(
            f"--residency {describe(policies.residency)} cuts experts at full precision: leave "
            "out replicas"
        )


def _check_loads_have_slots(policies: Policies, pools: tuple[Pool, ...]) -> None:
    """Raise BadUsage when the resident replicas leave a pool without slots and the miss policy
    loads experts."""
    if not policies.miss.reads_shadows and not all(pool.num_slots for pool in pools):
        raise BadUsage(
            f"--residency {describe(policies.residency)} leaves no slot to what --miss "
            f"{describe(policies.miss)} loads: give --miss shadow too, or a larger budget"
        )
