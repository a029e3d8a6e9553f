"""The place that a trace is replayed on: experts of few bits, and a machine by its data sheet or as
it was measured."""

from dataclasses import replace
from pathlib import Path

from artifacts.errors import BadUsage, Incompatible
from artifacts.hardware.costs import DENSE_ON_GPU, Costs
from artifacts.hardware.machines import HERE, Machine
from artifacts.hardware.profile import REMEDY
from artifacts.shape import FULL_BITS
from artifacts.store.hardware_profiles import profile_for
from artifacts.store.store import Store
from moectl.shared.timed_machine import timed_machine
from moectl.shared.trace_source import OpenedTrace
from runtime.replay import from_trace
from runtime.replay.measured_machine import costs_of, machine_of


def place_trace(
    opened: OpenedTrace, name: str, path: Path, *, base: int, dense: int | None
) -> tuple[OpenedTrace, Machine, Costs | None]:
    """Return the trace on its base, the machine of that name, and what the model costs there if
    that was measured.

    `here` is this machine, as the store's hardware profile describes it, with weights besides
    experts as published. Raises BadUsage for an unknown machine, Incompatible when there is no such
    profile.
    """
    if dense is not None and name == HERE:
        raise BadUsage(
            f"--dense {dense}: a hardware profile is of dense weights as published; name another "
            "--machine"
        )
    based = _with_dense(trace_on_base(opened, base), dense)
    shape = opened.model.shape
    if name != HERE:
        return based, timed_machine(name), None
    if not path.exists():
        raise Incompatible(
            f"there is no store {path} with a hardware profile: {REMEDY}, or name a machine"
        )
    with Store.open(path, read_only=True) as store:
        profile = profile_for(store, shape, name=opened.model.name)
    costs = costs_of(profile, shape).on_base(
        base, based.model.shape.expert_nbytes / shape.expert_nbytes
    )
    return based, machine_of(profile, shape), costs


def _with_dense(opened: OpenedTrace, bits: int | None) -> OpenedTrace:
    """Return the trace with a note on the assumed cost of weights beside experts at few bits."""
    if bits is None:
        return opened
    assumed = (*opened.model.assumed, DENSE_ON_GPU.format(bits=bits))
    return replace(opened, model=replace(opened.model, assumed=assumed))


def trace_on_base(opened: OpenedTrace, bits: int) -> OpenedTrace:
    """Return the trace with experts that are replicas of `bits` bits: the store's, else of usual
    size and loss."""
    if bits == FULL_BITS:
        return opened
    model = opened.model
    replicas = opened.artefacts.replicas
    notes = (
        ()
        if replicas
        else ("the base: replicas as large as in groups of 128, losses as of a small model",)
    )
    based = (replicas or from_trace.replicas(opened.trace, model, named=(bits,))).on_base(bits)
    nbytes = based.nbytes[FULL_BITS]
    return replace(
        opened,
        model=replace(
            model,
            shape=replace(model.shape, expert_nbytes=nbytes, num_neurons=0, neuron_nbytes=1),
            weight_nbytes=model.weight_nbytes * nbytes / model.shape.expert_nbytes,
            assumed=(*model.assumed, *notes),
        ),
        artefacts=replace(opened.artefacts, replicas=based),
    )


def base_suffix(bits: int) -> str:
    """Return what a table adds to the size of an expert that is not the checkpoint's own."""
    return "" if bits == FULL_BITS else f", replicas of {bits} bits"


def dense_suffix(bits: int | None) -> str:
    """Return what a table adds where weights besides experts have few bits."""
    return "" if bits is None else f", dense weights of {bits} bits"
