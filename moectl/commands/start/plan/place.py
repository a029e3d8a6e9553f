"""The place that a plan is for: a named machine, a size of memory, or the GPU of this machine."""

from dataclasses import dataclass

from artifacts.errors import BadUsage
from artifacts.hardware.machines import MACHINES, Machine, machine_with
from moectl.shared.timed_machine import timed_machine
from moectl.show.render import human_bytes
from profilers.hardware.this_machine import gpus_of_driver
from runtime.control import sizes

USUAL_MACHINE = "rtx3090-pcie4"
_NO_GPU = (
    "no GPU is found here: name a machine, as --machine rtx4060, rtx4090, rtx5090, h200 or m4-max "
    "(`moectl inspect machines` lists all), or give a memory, as --vram 24GB"
)


@dataclass(frozen=True, slots=True)
class PlanPlace:
    """A place: `vram_nbytes` of memory, written as `vram`, on a `machine`, None if its bandwidths
    are unknown. `options` name both on a command line; `note` says what was chosen because the user
    did not name it."""

    vram_nbytes: int
    vram: str
    machine: Machine | None
    options: str
    note: str = ""

    @classmethod
    def find(cls, vram: str | None, named: str | None) -> "PlanPlace":
        """Return the place of `--vram` and `--machine`; a missing one is taken from the other or
        from this machine. Raises BadUsage."""
        chosen, note, options = _machine(vram, named)
        if vram is not None:
            return cls(_checked(vram), vram, chosen, f"--vram {vram}{options}", note)
        if named is None:
            gpu, nbytes = gpus_of_driver()[0]
            return cls(nbytes, human_bytes(nbytes), chosen, "", f"the GPU of this machine: {gpu}")
        size = f"{chosen.fast_gb:g}GB"
        return cls(sizes.nbytes(size), size, chosen, options.strip(), note)

    @property
    def shown(self) -> str:
        return f"{self.vram} of {self.machine.name}" if self.machine else self.vram


def _machine(vram: str | None, named: str | None) -> tuple[Machine | None, str, str]:
    """Return the machine, a note if the user did not name it, and the option that names it."""
    if named is not None:
        return timed_machine(named), "", f" --machine {named}"
    gpus = gpus_of_driver()
    if gpus:
        return machine_with(gpus[0][0]), f"bandwidths of this machine's GPU: {gpus[0][0]}", ""
    if vram is None:
        raise BadUsage(_NO_GPU)
    return MACHINES[USUAL_MACHINE], f"bandwidths of {USUAL_MACHINE}, for no --machine was named", ""


def _checked(vram: str) -> int:
    nbytes = sizes.nbytes(vram)
    if nbytes < 1:
        raise BadUsage(f"--vram {vram} is no memory: write bytes, as 24GB")
    return nbytes


def smallest_with(nbytes: int) -> str:
    """Say which known machine is the smallest with so much memory."""
    large = [
        each
        for each in MACHINES.values()
        if each.fast_gb is not None and each.fast_gb * 1e9 >= nbytes
    ]
    if not large:
        return "no machine that moectl knows has that much"
    smallest = min(large, key=lambda each: each.fast_gb)
    return f"the smallest known machine with that much is {smallest.name} ({smallest.fast_gb:g} GB)"
