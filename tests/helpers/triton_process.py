"""Triton in tests: its interpreter in a separate process, because triton chooses interpreter or
compiler when it is imported; and kernels compiled for a GPU on any machine."""

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

from tests import ROOT


def why_not(triton: str | None, numpy: str) -> str:
    """Why kernels for GPUs cannot be tested with these versions; empty if they can."""
    if triton is None:
        return "triton is not installed here: kernels for GPUs stay untested"
    if Version(triton) < Version("3.7") and Version(numpy) >= Version("2.4"):
        return (
            f"the interpreter of triton {triton} fails with numpy {numpy}: it needs triton 3.7 or "
            "numpy below 2.4"
        )
    return ""


_WHY_NOT = why_not(version("triton") if find_spec("triton") else None, version("numpy"))
needs_triton = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)
# Imports once, which takes seconds, and forks for every request, so that requests share no state.
_SERVER = """
import io, json, os, sys, traceback
import torch
import tools.gpu.checks.kernels, runtime.session.session
import runtime.kernels.gpu.experts.gated, runtime.kernels.gpu.experts.gated_packed
import runtime.kernels.gpu.experts.gated_tiles
import runtime.kernels.gpu.experts.gated_published, tools.gpu.checks.published
from numba.core.registry import cpu_target
from runtime.session import build
build.TritonDecoder = lambda opened: None  # it is tried at length: tests of its own put it back
cpu_target.typing_context.refresh(), cpu_target.target_context.refresh()  # what else every fork would do
torch.set_num_threads(1)
for request in sys.stdin:
    code, *arguments = json.loads(request)
    reading, writing = os.pipe()
    if not (child := os.fork()):
        sys.argv[1:], sys.stdout, failed = arguments, io.StringIO(), None
        try:
            exec(compile(code, "<test>", "exec"), {"__name__": "__test__"})
        except BaseException:
            failed = traceback.format_exc()
        with open(writing, "w") as answer:
            json.dump([sys.stdout.getvalue().splitlines(), failed], answer)
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        print(answer.read() or json.dumps([[], "the process died"]), flush=True)
    os.waitpid(child, 0)
"""


def interpret(code: str, *arguments: str) -> list[str]:
    """Run `code` under triton's interpreter with `arguments` as sys.argv[1:], and return the lines
    that it prints."""
    server = _server()
    server.stdin.write(json.dumps([code, *arguments]) + "\n")
    server.stdin.flush()
    lines, failed = json.loads(server.stdout.readline())
    assert failed is None, failed
    return lines


@cache
def _server() -> subprocess.Popen:
    """The server process, which ends with its parent."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen([sys.executable, "-c", _SERVER], env=environment, text=True, **pipes)
    atexit.register(server.communicate)
    return server


@contextmanager
def compiler(folder: Path) -> Iterator[None]:
    """Make triton compile anew, with `folder` as its cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield


def compiled(
    kernel,
    capability: int,
    tensors: dict[str, str],
    *,
    odd: tuple[str, ...] = (),
    stages: int = 3,
    **constants: object,
) -> dict[str, object]:
    """Compile a kernel for a GPU of that compute capability and return its codes by name (`ptx`,
    `cubin`). Parameters not in `tensors` or `constants` are int32; all but the `odd` are multiples
    of 16, as for a model's usual sizes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else tensors.get(name, "i32") for name in names}
    even = [name for name in names if name not in constants and name not in odd]
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in even}
    source = ASTSource(
        kernel, types, {(names.index(name),): value for name, value in constants.items()}, divisible
    )
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_stages": stages}
    ).asm
