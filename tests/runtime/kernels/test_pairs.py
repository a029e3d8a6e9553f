"""The processor's own dot products give what float64 gives, are written for Arm as well, and are
done without."""

import os
import subprocess
import sys

import numpy as np
import pytest
from llvmlite import binding, ir

from artifacts.common.llvm_vectors import FEATURES
from tests import ROOT

pytestmark = pytest.mark.slow

LESS = "haswell" if "avx512f" in FEATURES else "generic"
WITHOUT_THEM = (
    "tests/runtime/backends/test_cpu_backend.py::test_kernels_equal_the_module_at_odd_sizes[torch.bfloat16-64-48-silu]",
    "tests/runtime/backends/test_cpu_backend.py::test_packed_kernels_equal_the_oracle[torch.bfloat16-64-48-16-4]",
    "tests/runtime/kernels/test_trellis.py::test_products_equal_those_with_the_oracle"
    "[(100, 256, 2, 0, False)-torch.bfloat16]",
    "tests/artifacts/formats/test_numbers.py::test_compiled_loops_give_the_bits_of_the_formula[fp8-dtype1]",
)


def test_sums_of_any_length_equal_those_of_float64() -> None:
    from numba import njit

    from runtime.kernels.cpu.published.pairs import HAS_DOT, STEP, dot

    if not HAS_DOT:
        pytest.skip("this processor multiplies no pairs of bfloat16")
    product = njit(lambda row, x: dot(row.ctypes.data, x.ctypes.data, len(x) // STEP))
    random = np.random.default_rng(0)
    for steps in range(10):
        numbers = random.standard_normal((2, steps * STEP)).astype(np.float32).view(np.uint32) >> 16
        row, x = (numbers << 16).view(np.float32).astype(float)
        assert abs(product(*numbers.astype(np.uint16)) - row @ x) <= 1e-6 * np.abs(row * x).sum()


def test_on_arm_it_is_an_instruction_of_its_own() -> None:
    from runtime.kernels.cpu.published.pairs import add_by_bfdot, write_dot

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    module = ir.Module()
    address = ir.IntType(64)
    module.triple = "aarch64-unknown-linux-gnu"
    function = ir.Function(module, ir.FunctionType(ir.FloatType(), [address] * 3), "dot")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(write_dot(builder, *function.args, add_by_bfdot))
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    machine = binding.Target.from_triple(module.triple).create_target_machine(cpu="neoverse-v1")
    written = machine.emit_assembly(parsed)
    # 4 vectors at once, then one; no calls
    assert written.count("bfdot") == 4 * (4 + 1) and "\tbl\t" not in written


def test_kernels_do_without_instructions_that_a_processor_has_not() -> None:
    """On one with AVX-512 they run as if it had none, on another one as if it had no vectors of 256
    bits either."""
    others = {name: value for name, value in os.environ.items() if name != "NUMBA_CPU_FEATURES"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *WITHOUT_THEM]
    done = subprocess.run(
        command, cwd=ROOT, env=others | {"NUMBA_CPU_NAME": LESS}, capture_output=True, text=True
    )
    assert done.returncode == 0 and f"{len(WITHOUT_THEM)} passed" in done.stdout, (
        done.stdout + done.stderr
    )
