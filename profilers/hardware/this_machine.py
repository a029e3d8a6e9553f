"""The machine that this process runs on: the properties that measurements depend on."""

import os
import platform
import runpy
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.common.host_memory import host_memory, lines_of, num_cores

if TYPE_CHECKING:  # torch takes seconds to import, and a glance does without
    import torch


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """Properties of this machine. `cores` counts the cores that this process may use,
    `memory_nbytes` is RAM or the container's limit, `locked_nbytes` the limit of page-locked memory
    or None. `load` is the number of processes that ran or waited in the last minute, None where the
    system does not count them."""

    processor: str
    cores: int
    threads: int
    memory_nbytes: int
    available_nbytes: int
    locked_nbytes: int | None
    load: float | None
    gpu: str | None
    gpu_nbytes: int

    @classmethod
    def look(cls, device: "torch.device") -> "LocalMachine":
        """Observe the machine now; `device` is the one that computes."""
        import torch

        from runtime.devices import gpu_of

        return cls._of(torch.get_num_threads(), gpu_of(device))

    @classmethod
    def glance(cls, device: str, threads: int) -> "LocalMachine":
        """Observe the machine without torch. `threads` threads would compute on `device`, as the
        user names it."""
        gpus = gpus_of_driver() if device != "cpu" and cuda_of_torch() else []
        return cls._of(threads, gpus[0] if gpus else None)

    @classmethod
    def _of(cls, threads: int, gpu: tuple[str, int] | None) -> "LocalMachine":
        memory, available = host_memory()
        name, nbytes = gpu or (None, 0)
        return cls(
            processor=_processor(),
            cores=num_cores(),
            threads=threads,
            memory_nbytes=memory,
            available_nbytes=available,
            locked_nbytes=_locked(),
            load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            gpu=name,
            gpu_nbytes=nbytes,
        )


@cache
def gpus_of_driver() -> list[tuple[str, int]]:
    """Name and bytes of each GPU that NVIDIA's driver sees; none where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    asked = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    rows = (line.rpartition(",") for line in done.stdout.splitlines() if done.returncode == 0)
    return [
        (name.strip(), int(mebibytes) << 20)
        for name, _, mebibytes in rows
        if mebibytes.strip().isdecimal()
    ]


def cuda_of_torch() -> str | None:
    """The version of CUDA for which the installed torch was built; None: for none. torch is not
    imported."""
    spec = find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    return runpy.run_path(str(version)).get("cuda") if version and version.is_file() else None


def _processor() -> str:
    for line in lines_of(Path("/proc/cpuinfo")):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _locked() -> int | None:
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit
