"""Processes for tests of Triton kernels: triton decides as it is imported whether it interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import triton"], capture_output=True, check=False).returncode != 0,
    reason="triton is not installed here: kernels for GPUs stay untested",
)


def run(code: str, *arguments: str, **variables: str) -> list[str]:
    """What a process of its own prints; without TRITON_INTERPRET unless `variables` have it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def cubin_size(kernel, capability: int, tensors: dict[str, str], **constants: object) -> int:
    """Bytes of a kernel compiled for a GPU of that capability, here; parameters that are no tensor are int32."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else tensors.get(name, "i32") for name in names}
    source = ASTSource(kernel, types, {(names.index(name),): value for name, value in constants.items()})
    return len(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"])
