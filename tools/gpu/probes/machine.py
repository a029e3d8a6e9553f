"""The machine: what the driver, the file system and Python say of it.

python -m tools.gpu.probes.machine
"""

import importlib
import os
import shutil
import subprocess
import tempfile
import time

from artifacts.common.host_memory import host_memory
from tools.gpu.groups import tell

QUERY = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,power.limit"
PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "numpy",
    "safetensors",
    "pyarrow",
    "accelerate",
    "numba",
    "duckdb",
)


def main() -> None:
    memory, available = host_memory()
    disk = shutil.disk_usage(tempfile.gettempdir())
    tell(name="nvidia-smi", text=_nvidia())
    tell(
        name="host",
        cores=len(os.sched_getaffinity(0)),
        memory_nbytes=memory,
        available_nbytes=available,
    )
    tell(name="disk", nbytes=disk.total, free_nbytes=disk.free, folder=tempfile.gettempdir())
    for package in PACKAGES:
        tell(name=f"import {package}", **_imported(package))


def _nvidia() -> str:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return "there is no nvidia-smi here"
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout or done.stderr).strip()


def _imported(package: str) -> dict[str, object]:
    """The version and the seconds of the import, or the error: a package may be there and not fit
    the others."""
    begin_s = time.perf_counter()
    try:
        module = importlib.import_module(package)
    except Exception as error:
        return {"why_not": f"{type(error).__name__}: {error}"[:200]}
    return {
        "version": getattr(module, "__version__", "?"),
        "seconds": round(time.perf_counter() - begin_s, 2),
    }


if __name__ == "__main__":
    main()
