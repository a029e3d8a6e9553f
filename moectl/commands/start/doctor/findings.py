"""Findings on a model and its machine, in plain sentences, each with a remedy if something is
wrong."""

import platform
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from artifacts.hardware.numa import nodes_with_memory, several_nodes
from artifacts.hardware.profile import COLD, COMMAND, HardwareProfile
from artifacts.quantisation.replicas import typical
from artifacts.shape import FULL_BITS, Shape
from artifacts.store.store import Store
from moectl.commands.build.profile.hardware import HardwareMeasurement
from moectl.shared import installed
from moectl.shared.defaults import default_store
from moectl.shared.terminal import neighbours
from moectl.show.render import human_bytes
from profilers.hardware.this_machine import LocalMachine, cuda_of_torch, gpus_of_driver

if TYPE_CHECKING:  # it imports torch
    from profilers.compare.check_prediction import Prediction

SLOW_DISK_GBPS = 1.0
_NAMED = ("torch", "transformers", "duckdb")
_BUILT = {
    "profile": (
        "no routing profile of this model: policies know nothing of its routers",
        "moectl profile",
    ),
    "build-buddies": ("no buddy lists: presets that substitute cannot run", "moectl build-buddies"),
    "quantize": (
        "no replicas below full precision: presets that compute on few bits cannot run",
        "moectl quantize",
    ),
    COMMAND: (
        "no hardware profile: what a run will take is not known",
        "moectl profile --hardware",
    ),
}


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One observation. `remedy` is a command or an advice, None where nothing is wrong."""

    topic: str
    says: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of an examination of a machine and a model.

    `measured` is None if nothing was measured and the store has no profile. `is_stored` tells
    whether it came from the store. `prediction` is None unless one was checked.
    """

    model: str
    findings: list[DoctorFinding]
    measured: HardwareMeasurement | None = None
    is_stored: bool = False
    prediction: "Prediction | None" = None


def of_installation() -> list[DoctorFinding]:
    """Report Python, the packages that moectl needs, and the packages of each extra."""
    if not installed.is_installed():
        says = "moectl runs from its sources: what it needs, and whether that is here, is not known"
        return [
            DoctorFinding("installation", says, "pip install . in the folder of its pyproject.toml")
        ]
    needs = installed.needs()
    installed.check()
    named = ", ".join(str(need) for need in needs if need.name in _NAMED)
    says = (
        f"Python {platform.python_version()}, {named}; what moectl needs is here, {len(needs)} "
        "packages"
    )
    return [
        DoctorFinding("installation", says),
        *(_shared_name(name, owners) for name, owners in neighbours.sharing().items()),
        *(_extra(name, purpose) for name, purpose in installed.EXTRAS.items()),
    ]


def _shared_name(name: str, owners: list[str]) -> DoctorFinding:
    return DoctorFinding(
        f"package {name}", f"{', '.join(owners)} owns files under this name too", neighbours.REMEDY
    )


def _extra(name: str, purpose: str) -> DoctorFinding:
    needs = installed.needs(name)
    says = f"for {purpose}: {', '.join(map(str, needs))}"
    return DoctorFinding(
        f"extra {name}",
        says,
        None if all(need.is_met for need in needs) else f"pip install 'moectl[{name}]'",
    )


def of_machine(here: LocalMachine, shape: Shape | None) -> list[DoctorFinding]:
    """Report the GPU, threads and load, and memory for experts of a known shape."""
    memory = [_memory(here, shape), _pinning(here, shape)] if shape else []
    return [_gpu(here, shape), *memory, *_nodes(), _threads(here), *_load(here)]


def of_disk(profile: HardwareProfile) -> list[DoctorFinding]:
    """Report how fast experts come from the disk, if the profile could measure it."""
    cold = next((load for load in profile.loads if load.link == COLD), None)
    if cold is None:
        return [
            DoctorFinding(
                "disk", "how fast the disk is cannot be told here: what it has read stays in memory"
            )
        ]
    times = cold.seconds.median / profile.decode.expert.median
    says = (
        f"an expert comes from the disk at {cold.gbps:.2g} GB/s, {times:.2g} times as long as "
        "computing it takes"
    )
    remedy = "a larger --budget, a faster disk, or RAM that keeps what was read"
    return [DoctorFinding("disk", says, remedy if cold.gbps < SLOW_DISK_GBPS else None)]


def of_experts(stored_as: str, dtype: str) -> DoctorFinding:
    """Report the format in which the checkpoint has its experts, as `mxfp4, 4.25 bits`, and the
    model's dtype."""
    return DoctorFinding(
        "experts", f"stored as {stored_as} a weight with scales; computed in {dtype}"
    )


def of_dense(nbytes: Mapping[int | None, int]) -> DoctorFinding:
    """Report what weights besides routed experts take in memory, by the bits of `--dense`."""
    if not nbytes:
        return DoctorFinding(
            "dense weights", "what all but routed experts takes is not known from the config"
        )
    fewer = ", ".join(
        f"{human_bytes(own)} with --dense {bits}"
        for bits, own in nbytes.items()
        if bits is not None
    )
    return DoctorFinding(
        "dense weights", f"all but routed experts takes {human_bytes(nbytes[None])}; {fewer}"
    )


def of_room(path: Path, shape: Shape, *, weight_nbytes: float) -> DoctorFinding:
    """Report whether the store's disk has room for replicas of all widths; `weight_nbytes` is the
    size of a weight."""
    folder = next(each for each in path.absolute().parents if each.is_dir())
    free = shutil.disk_usage(folder).free
    sizes = typical(
        np.ones((1, 1)), expert_nbytes=shape.expert_nbytes, weight_nbytes=weight_nbytes
    ).nbytes
    wanted = shape.num_keys * sum(nbytes for bits, nbytes in sizes.items() if bits != FULL_BITS)
    says = (
        f"replicas of every expert at 1 to 4 bits take {human_bytes(wanted)} beside the store, "
        f"{human_bytes(free)} are free there"
    )
    remedy = "free some, give a --store on another disk, or fewer widths: moectl quantize --bits 4"
    return DoctorFinding("disk space", says, remedy if wanted > free else None)


def of_store(path: Path, model_ids: Collection[str], *, model: str | None) -> list[DoctorFinding]:
    """Report the artefacts that the model, by any of its ids, lacks."""
    shown = "" if path == default_store() else f" --store {path}"
    built = _commands(path, model_ids)
    named = f" {model}" if model else ""
    takes_model = {"profile", "quantize", COMMAND}
    return [
        DoctorFinding("store", says, f"{verb}{named if command in takes_model else ''}{shown}")
        for command, (says, verb) in _BUILT.items()
        if command not in built
    ]


def of_profile(profile: HardwareProfile, here: LocalMachine) -> list[DoctorFinding]:
    """Report whether the stored profile is of this machine in its present state."""
    changes = ", ".join(
        f"{name} {then} then, {now} now" for name, then, now in changed(profile, here)
    )
    if not changes:
        return []
    says = f"it was measured otherwise: {changes}"
    return [DoctorFinding("hardware profile", says, "moectl profile --hardware")]


def changed(profile: HardwareProfile, here: LocalMachine) -> list[tuple[str, object, object]]:
    """Return each condition by which this machine is not the profile's, then and now."""
    conditions = [
        (name, profile.conditions.get(name), getattr(here, name))
        for name in ("processor", "cores", "threads")
    ]
    return [one for one in conditions if one[1] != one[2]]


def _commands(path: Path, model_ids: Collection[str]) -> set[str]:
    if not path.exists():
        return set()
    with Store.open(path, read_only=True) as store:
        return {run.info.command for run in store.runs() if run.info.model_id in model_ids}


def _gpu(here: LocalMachine, shape: Shape | None) -> DoctorFinding:
    if here.gpu is not None:
        room = (
            f": room for {min(1.0, here.gpu_nbytes / shape.nbytes):.0%} of the experts at most"
            if shape
            else ""
        )
        return DoctorFinding("gpu", f"{here.gpu}, {human_bytes(here.gpu_nbytes)}{room}")
    is_built = cuda_of_torch() is not None
    if is_built and gpus_of_driver():
        return DoctorFinding("gpu", "there is a GPU, but the CPU was asked for", "--device cuda")
    says = "no GPU: experts are computed on the CPU, and the fast tier is a part of RAM"
    if not is_built:
        return DoctorFinding("gpu", says, "if the machine has one: install a torch built with CUDA")
    return DoctorFinding(
        "gpu", says, "if the machine has one: its driver is missing, or too old for this torch"
    )


def _memory(here: LocalMachine, shape: Shape) -> DoctorFinding:
    says = (
        f"the experts take {human_bytes(shape.nbytes)}, of RAM "
        f"{human_bytes(here.available_nbytes)} can be had"
    )
    if shape.nbytes <= here.available_nbytes:
        return DoctorFinding("memory", says)
    return DoctorFinding(
        "memory",
        f"{says}: they do not fit, and are read from the disk as they are wanted",
        "--link disk",
    )


def _pinning(here: LocalMachine, shape: Shape) -> DoctorFinding:
    if here.gpu is None:
        return DoctorFinding("page-locked memory", "none is wanted without a GPU")
    wanted = 1 << (shape.nbytes - 1).bit_length()  # torch rounds a block up to a power of two
    says = (
        f"a GPU's link wants up to {human_bytes(wanted)} page-locked, of RAM "
        f"{human_bytes(here.available_nbytes)} can be had "
    )
    limit = (
        "without a limit"
        if here.locked_nbytes is None
        else f"limit {human_bytes(here.locked_nbytes)}"
    )
    says += f"(ulimit -l: {limit}; CUDA's own locking mostly goes past it)"
    remedy = "--link disk; or `ulimit -l unlimited` and more RAM"
    is_enough = wanted <= here.available_nbytes
    return DoctorFinding("page-locked memory", says, None if is_enough else remedy)


def _nodes() -> list[DoctorFinding]:
    nodes = nodes_with_memory()
    if len(nodes) < 2:
        return []
    says = f"{len(nodes)} nodes: experts are spread over them"
    if several_nodes():
        return [DoctorFinding("numa", says)]
    says = f"{len(nodes)} nodes, and the process has a memory policy of its own, or may not ask"
    return [DoctorFinding("numa", says, "numactl --interleave=all before the command")]


def _threads(here: LocalMachine) -> DoctorFinding:
    best = max(1, here.cores - 1)
    says = f"{here.threads} of {here.cores} cores compute"
    if here.threads == best:
        return DoctorFinding("threads", says)
    is_full = here.threads > best
    why = "none is left to the link, and threads spin" if is_full else "the others stand idle"
    return DoctorFinding("threads", f"{says}: {why}", f"--threads {best}")


def _load(here: LocalMachine) -> list[DoctorFinding]:
    if here.load is None or here.load <= here.cores:
        return []
    says = (
        f"other work is under way, {here.load:.1f} processes on {here.cores} cores: figures are "
        "too high and vary"
    )
    return [DoctorFinding("load", says, "try again when the machine is idle")]
