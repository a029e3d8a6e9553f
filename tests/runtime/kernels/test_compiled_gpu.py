"""The Triton kernels compile for GPUs, and each thread reads 16 bytes of weights at a time: counted
in the PTX."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.kernels.gates import SILU, Gate
from runtime.kernels.gpu.addressing import gated_matrices
from tests import ROOT
from tests.helpers.triton_process import compiled, compiler, needs_triton
from tests.runtime.kernels.test_published_gpu import layout_of

pytestmark = [needs_triton, pytest.mark.slow]
CAPABILITIES = (80, 90, 120)
TENSORS = (
    dict.fromkeys(("x_ptr", "inner_ptr", "out_ptr"), "*bf16")
    | dict.fromkeys(
        ("numbers_ptr", "order_ptr", "tiles_ptr", "done_ptr", "words_ptr", "zeros_ptr"), "*i32"
    )
    | dict.fromkeys(("y_ptr", "weights_ptr", "shares_ptr"), "*fp32")
    | {"starts_ptr": "*i64", "keys_ptr": "*i64", "scales_ptr": "*fp16", "expert_ptr": "*u8"}
    | {"points_ptr": "*i8"}
)
TENSORS |= dict.fromkeys(("first", "second", "third", "fourth"), "i64")
IN_BF16 = TENSORS | {"arena_ptr": "*bf16"}
IN_BYTES = TENSORS | {"arena_ptr": "*u8"}
PLAIN = {"gate": SILU, "are_paired": False, "has_bias": False, "column": 1}
GPT_OSS = Gate("scaled", take_turns=True, alpha=1.702, limit=7.0)
APART, SUMS = ({"sums": sums, "is_wide": False, "width": 8} for sums in (False, True))
PAIRED = {"gate": GPT_OSS, "are_paired": True, "has_bias": True, "row": 1, "bias_step": 2}
ODD = ("top_k", "count", "num_tokens", "first", "second", "third", "fourth")
WIDE = re.compile(r"ld\.global[.\w:]*\.v4\.b32|cp\.async\.cg\.shared\.global \[.*\], \[.*\], 0x10")
OF_TWO_BYTES = re.compile(r"ld\.global[.\w:]*\.b16")
Ptx = Callable[..., str]


@pytest.fixture(params=CAPABILITIES)
def ptx(request: pytest.FixtureRequest, tmp_path: Path) -> Ptx:
    """A function that compiles a kernel for one compute capability, anew."""

    def build(kernel: object, tensors: dict[str, str], **own: object) -> str:
        codes = compiled(kernel, request.param, tensors, odd=ODD, **own)
        assert codes["cubin"]
        return codes["ptx"]

    with compiler(tmp_path):
        yield build


def jit_functions() -> list[ast.FunctionDef]:
    """Every function that Triton compiles."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for path in (ROOT / "runtime/kernels/gpu").rglob("*.py")
    ]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [
        each
        for each in functions
        if any("triton.jit" in ast.unparse(d) for d in each.decorator_list)
    ]


def test_an_attribute_of_a_constexpr_is_one_of_its_own_before_a_function_gets_it() -> None:
    """Triton 3.6 does not compile it otherwise, but for a number or a type."""
    functions = jit_functions()
    handed_on = []
    names = {function.name for function in functions}
    for function in functions:
        own = {each.arg for each in function.args.args if each.annotation} | {
            node.target.id for node in ast.walk(function) if isinstance(node, ast.AnnAssign)
        }
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) in names:
                given = [*call.args, *(keyword.value for keyword in call.keywords)]
                handed_on += [
                    (function.name, text)
                    for text in map(ast.unparse, given)
                    if attribute_of(text) in own
                ]
    assert {"product", "_scales"} <= names and not handed_on, (
        "name it before: `x: tl.constexpr = matrix.x`"
    )


def attribute_of(text: str) -> str | None:
    """The name whose attribute, or attribute's attribute, an expression is; None for any other
    expression."""
    root, *attributes = text.split(".")
    return root if attributes and all(part.isidentifier() for part in (root, *attributes)) else None


def wide(code: str) -> int:
    return len(WIDE.findall(code))


def test_experts_of_a_token_are_read_16_bytes_a_thread(ptx: Ptx) -> None:
    """Each step of a program takes 4 KiB of a matrix: 128 threads, twice 16 bytes."""
    from runtime.kernels.gpu.experts import gated

    few = {"are_packed": True, "block_rows": gated._ROWS, "block_columns": gated._COLUMNS}
    inner = ptx(gated._inner, IN_BF16, **PLAIN, **few)
    down = ptx(gated._down, IN_BF16, adds=False, has_bias=False, neuron=1, **few, **APART)
    assert (wide(inner), wide(down)) == (4, 2)
    assert not OF_TWO_BYTES.search(inner + down)
    summing = ptx(gated._down, IN_BF16, adds=False, has_bias=False, neuron=1, **few, **SUMS)
    assert wide(summing) == 2
    assert_counted_in_order(summing)
    along_rows = {"are_packed": False, "output": 1, "block_rows": 64, "block_columns": 32}
    assert wide(ptx(gated._down, IN_BF16, adds=True, has_bias=False, **along_rows, **APART)) == 4
    assert wide(ptx(gated._down, IN_BF16, adds=False, has_bias=True, **along_rows, **APART)) == 2
    paired = ptx(gated._inner, IN_BF16, are_packed=True, block_rows=32, block_columns=32, **PAIRED)
    assert wide(paired) == 2, "gate and up of 32 neurons in turn, 32 inputs"


def assert_counted_in_order(code: str) -> None:
    """What a program writes comes before a barrier of its threads, then its count, another barrier,
    and what it reads of others; only then the sum is written."""
    done = code.index("atom.global.gpu.acq_rel")
    wrote = code.index("st.global")
    before = code[wrote:done]
    after = code[done:]
    assert "bar.sync" in before and "ld.global" not in before
    assert 0 < after.index("bar.sync") < after.index("ld.global") < after.rindex("st.global.")
    assert "ld.global.nc" not in code, (
        "such a load may read what another program has not written yet"
    )


def test_experts_of_many_tokens_come_by_asynchronous_copies(ptx: Ptx) -> None:
    import triton.language as tl

    from runtime.kernels.gpu.experts import gated_tiles

    blocks = {
        "block_tokens": 64,
        "block_outputs": 64,
        "block_inputs": 64,
        "operand": tl.bfloat16,
        "precision": "tf32",
    }
    of_down = {"adds": False, "stages": 2, **blocks}
    inner = ptx(gated_tiles._inner, IN_BF16, stages=2, **PLAIN, **blocks)
    down = ptx(gated_tiles._down, IN_BF16 | {"y_ptr": "*bf16"}, has_bias=False, neuron=1, **of_down)
    assert (inner.count("cp.async.cg"), down.count("cp.async.cg")) == (
        24,
        16,
    )  # two stages of x, gate, up or x, down
    assert not OF_TWO_BYTES.search(inner + down)
    inner = ptx(gated_tiles._inner, IN_BF16, stages=2, **PAIRED, **blocks)
    down = ptx(gated_tiles._down, IN_BF16 | {"y_ptr": "*bf16"}, has_bias=True, output=1, **of_down)
    assert (inner.count("cp.async.cg"), down.count("cp.async.cg")) == (24, 16)


def test_packed_words_are_read_16_bytes_a_thread(ptx: Ptx) -> None:
    from runtime.kernels.gpu import low_bit
    from runtime.kernels.gpu.experts import gated_packed

    blocks = {"are_packed": True, "block_outputs": 32, "block_inputs": 64}
    assert wide(ptx(gated_packed._inner, TENSORS, own=SILU, bits=4, **blocks)) == 8
    assert wide(ptx(gated_packed._down, TENSORS, bits=3, **blocks)) == 8
    blocks = {"bits": 3, "block_outputs": 64, "block_inputs": 64}
    assert (
        wide(ptx(low_bit._multiply, TENSORS, stages=2, num_rows=16, precision="tf32", **blocks))
        == 34
    )
    assert wide(ptx(low_bit._unpack, TENSORS, **blocks)) >= 16


def test_codes_of_published_formats_are_read_16_bytes_a_thread(ptx: Ptx) -> None:
    from runtime.kernels.gpu import published
    from runtime.kernels.gpu.experts import gated_published

    for name, count in {
        "fp8 in blocks": 1,
        "mxfp4": 1,
        "packed, 8 bits": 1,
        "gptq_v2, 3 bits": 8,
        "awq": 3,
    }.items():
        matrix = gated_matrices(layout_of(name)).down
        code = ptx(
            gated_published._down,
            IN_BYTES,
            matrix=matrix,
            are_packed=True,
            **published.block_sizes(matrix),
            **SUMS,
        )
        assert wide(code) >= count, name
        assert_counted_in_order(code)


def test_the_other_kernels_compile(tmp_path: Path) -> None:
    from runtime.kernels.gpu import published
    from runtime.kernels.gpu.experts import gated, gated_published, weighted_sum

    with compiler(tmp_path):
        assert compiled(
            weighted_sum._combine, 90, TENSORS, is_wide=True, width=8, block_tokens=8, block=256
        )["cubin"]
        for rule in ("gelu", "gelu_tanh", "relu2"):
            own = PLAIN | {"gate": Gate(rule, has_up=rule != "relu2")}
            assert compiled(
                gated._inner, 90, IN_BF16, are_packed=True, block_rows=8, block_columns=256, **own
            )["cubin"]
        clamped = gated_matrices(layout_of("mxfp4"), GPT_OSS)
        own = {"matrices": clamped, "are_packed": True, **published.block_sizes(clamped.gate)}
        assert compiled(gated_published._inner, 80, IN_BYTES, **own)["cubin"]
        for name, capability in {
            "packed, 4 bits, in any order": 80,
            "nvfp4, inverse": 90,
            "Q5_K": 80,
            "IQ3_S": 90,
        }.items():
            matrix = gated_matrices(layout_of(name, neurons=256)).down
            own = {"matrix": matrix, **published.block_sizes(matrix)}
            assert compiled(published._dequantise, capability, TENSORS, **own)["cubin"]
