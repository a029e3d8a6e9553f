"""The place that a plan is for: a machine's memory, RAM and disk, as the user names them or as this
machine has them."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from artifacts.common.host_memory import host_memory
from artifacts.errors import BadUsage
from artifacts.hardware.machines import MACHINES, Machine, machine_with
from artifacts.hardware.machines import machine as known_machine
from moectl.shared.timed_machine import timed_machine
from moectl.show.sizes import human_bytes
from profilers.hardware.this_machine import gpus_of_driver
from runtime.control import sizes

USUAL_MACHINE = "rtx3090-pcie4"
SYSTEM_NBYTES = 4 << 30
"""RAM that other programs take."""
ASSUMED_RAM_NBYTES = 64 * 10**9
"""Of a machine that is not this one, where `--ram` does not say."""


@dataclass(frozen=True, slots=True)
class PlanPlace:
    """A place: `vram_nbytes` of memory, written as `vram`, on a `machine`, None if its bandwidths
    are unknown, with `ram_nbytes` of RAM beside and `disk_nbytes` free on its disk, None if that is
    not known. `options` name them on a command line; `note` says what was chosen because the user
    did not name it. `has_one_memory`: without a GPU the RAM is the memory; `is_here`: it is this
    machine."""

    vram_nbytes: int
    vram: str
    machine: Machine | None
    options: str
    note: str = ""
    ram_nbytes: int = ASSUMED_RAM_NBYTES
    disk_nbytes: int | None = None
    has_one_memory: bool = False
    is_here: bool = False

    @classmethod
    def find(
        cls,
        vram: str | None = None,
        named: str | None = None,
        *,
        ram: str | None = None,
        disk: str | None = None,
    ) -> "PlanPlace":
        """Return the place of `--vram`, `--machine`, `--ram` and `--disk`; a missing one is taken
        from the others or from this machine. Raises BadUsage."""
        is_here = vram is None and named is None
        place = replace(cls._of_gpu(vram, named), is_here=is_here)
        given = {"--ram": ram, "--disk": disk}
        options = [f" {name} {size}" for name, size in given.items() if size is not None]
        return replace(
            place,
            options=f"{place.options}{''.join(options)}".strip(),
            ram_nbytes=place._ram() if ram is None else _checked("--ram", ram),
            disk_nbytes=place._disk() if disk is None else _checked("--disk", disk),
        )

    @classmethod
    def _of_gpu(cls, vram: str | None, named: str | None) -> "PlanPlace":
        gpus = gpus_of_driver()
        if vram is None and named is None and not gpus:
            room = max(1, host_memory()[0] - SYSTEM_NBYTES)
            note = "no GPU is found here: experts are computed on the CPU, in RAM"
            return cls(room, f"{human_bytes(room)} of RAM", None, "", note, has_one_memory=True)
        chosen, note, options = _machine(vram, named)
        if vram is not None:
            return cls(_checked("--vram", vram), vram, chosen, f"--vram {vram}{options}", note)
        if named is None:
            gpu, nbytes = gpus[0]
            return cls(nbytes, human_bytes(nbytes), chosen, "", f"the GPU of this machine: {gpu}")
        size = f"{chosen.fast_gb:g}GB"
        return cls(sizes.nbytes(size), size, chosen, options.strip(), note)

    @property
    def shown(self) -> str:
        return f"{self.vram} of {self.machine.name}" if self.machine else self.vram

    def _ram(self) -> int:
        if self.has_one_memory or self.machine and self.machine.is_unified:
            return 0
        return host_memory()[0] if self.is_here else ASSUMED_RAM_NBYTES

    def _disk(self) -> int | None:
        if not self.is_here:
            return None
        home = Path.home()  # where downloads go
        return shutil.disk_usage(home if home.exists() else Path.cwd()).free


def _machine(vram: str | None, named: str | None) -> tuple[Machine | None, str, str]:
    """Return the machine, a note if the user did not name it, and the option that names it."""
    if named is not None:
        try:
            known_machine(named.partition(":")[0])
        except BadUsage as error:
            told = str(error).partition(" Known: ")[0]
            raise BadUsage(f"{told} Of any other card give the memory: --vram 12GB") from error
        return timed_machine(named), "", f" --machine {named}"
    gpus = gpus_of_driver()
    if gpus:
        return machine_with(gpus[0][0]), f"bandwidths of this machine's GPU: {gpus[0][0]}", ""
    return MACHINES[USUAL_MACHINE], f"bandwidths of {USUAL_MACHINE}, for no --machine was named", ""


def _checked(option: str, size: str) -> int:
    nbytes = sizes.nbytes(size)
    if nbytes < 1:
        raise BadUsage(f"{option} {size} is no memory: write bytes, as 24GB")
    return nbytes
