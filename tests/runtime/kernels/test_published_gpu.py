"""The Triton kernels for the published formats give the bits of the formulas and the outputs of the
dequantised experts in triton's interpreter on a CPU."""

import json
from dataclasses import replace

import pytest
import torch

from artifacts.formats.base import Stored
from runtime.kernels.gpu.addressing import BLOCKS, gated_matrices, is_readable
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.layout import ExpertLayout, Part, stored_part
from tests.helpers.triton_process import interpret, needs_triton
from tools.gpu.checks.formats import CASES

pytestmark = pytest.mark.slow

JOINED = ("mxfp4", "awq", "fp8 in blocks")
ALLOWED = {
    "float32": 1e-6,
    "float16": 2e-3,
    "bfloat16": 2e-2,
}  # the interpreter truncates bfloat16 where a GPU rounds
EXPERTS = """
import json, sys
import torch
from runtime.kernels.gpu import published as kernels
from runtime.kernels.gpu.addressing import BLOCKS
from tools.gpu.checks import formats, published
formats.GROUP, kernels._BLOCKS = 32, dict.fromkeys(kernels._BLOCKS, (128, 128))
joined, dtypes = json.loads(sys.argv[1])
numbers = torch.tensor([[2, -1], [1, 2]], dtype=torch.int32)  # and a token with one expert
for number, (name, case) in enumerate(formats.CASES.items()):
    if name in BLOCKS:
        continue
    dtype = dtypes[number % len(dtypes)] if name in joined else dtypes[0]
    x = torch.randn(2, 160, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    experts = published.PublishedExperts(
        case, (160, 96, 2), count=3, dtype=x.dtype, device="cpu", is_joined=name in joined
    )
    is_pair = numbers.flatten() >= 0
    ours, theirs = experts.outputs(x, numbers)[is_pair], experts.by_formula(x, numbers)[is_pair]
    error = ((ours - theirs).norm() / theirs.norm()).item()
    print(json.dumps([name, dtype, error, dtype == "bfloat16" or experts.is_dequantised(1)]))
"""
CODES = """
import torch
from artifacts.formats.base import Stored
from artifacts.formats.fp8 import Scaled
from artifacts.formats.mxfp4 import MxFp4
from runtime.kernels.gpu.published import dequantise
from runtime.model.quantised.stored_matrix import stored_matrix
from runtime.model.layout import ExpertLayout, Part
every = torch.arange(256).byte()[None]
cases = [(Scaled(), {"weight": every.view(dtype), "scale": torch.ones(1)})
         for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)]
exponents = torch.arange(253).byte()[:, None]  # larger ones make 4 and 6 infinite
cases.append((MxFp4(), {"blocks": every[:, :16].repeat(253, 1), "scales": exponents}))
for form, tensors in cases:
    pieces = [Part("", each.dtype, tuple(each.shape), 0, role, 0, form) for role, each in tensors.items()]
    layout = ExpertLayout.stored(pieces, torch.float32)
    expert = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for role, each in layout.views(expert)[""][0].tensors.items():
        each.copy_(tensors[role])
    theirs = form.dequantise(tensors)
    ours = torch.empty_like(theirs)
    dequantise(expert, stored_matrix(layout.matrices[""][0]), ours)
    ours, theirs = (each[theirs.isfinite()].view(torch.int32) for each in (ours, theirs))
    print(int(torch.equal(ours, theirs)), theirs.numel())
plain = torch.randn(5, 7)
ours = torch.empty_like(plain)
placed = {"": Part("", plain.dtype, (5, 7))}
dequantise(plain.view(torch.uint8).flatten(), stored_matrix(placed), ours)
print(int(torch.equal(ours, plain)), plain.numel())
"""


IN_BLOCKS = """
import torch
from artifacts.formats.gguf.ggml import GGML
from runtime.backends.triton.forms_gpu import full_form
from runtime.kernels.gpu.addressing import BLOCKS
from runtime.kernels.gates import SILU
from runtime.kernels.gpu.published import dequantise
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.layout import ExpertLayout, Part
from runtime.model.quantised.stored_matrix import stored_matrix
from tools.bench.kernels.stored_matrices import random_blocks
from tools.gpu.checks.published import _expert
def laid_out(matrices):
    tensors = [random_blocks(GGML[name], rows, 256)["blocks"] for _, _, name, rows in matrices]
    pieces = [
        Part(part, torch.uint8, tuple(own.shape), 0, "blocks", source, GGML[name])
        for (part, source, name, _), own in zip(matrices, tensors)
    ]
    layout = ExpertLayout.stored(pieces, torch.float32)
    content = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for part, own in zip(layout.parts, tensors):
        part.bytes_of(content).copy_(own.flatten())
    return layout, content
for name in BLOCKS:
    layout, content = laid_out([("", 0, name, 3)])
    ours = torch.empty(3, 256)
    dequantise(content, stored_matrix(layout.matrices[""][0]), ours)
    print(name, int(torch.equal(ours, layout.weights(content)[""])))
mixed = [(GATE_UP, 0, "IQ2_XS", 256), (GATE_UP, 1, "IQ3_S", 256), (DOWN, 0, "Q4_K", 96)]
layout, content = laid_out(mixed)
x = torch.randn(1, 256)
y = torch.empty(1, 96)
full_form(SILU, layout, content, [0]).multiply(x, torch.zeros(1, 1, dtype=torch.int32), y)
exact = _expert(x[0].double(), layout.weights(content))
print(float((y[0] - exact).norm() / exact.norm()))
"""


def layout_of(name: str, hidden: int = 256, neurons: int = 128) -> ExpertLayout:
    matrices = [
        (GATE_UP, 0, neurons, hidden),
        (GATE_UP, 1, neurons, hidden),
        (DOWN, 0, hidden, neurons),
    ]
    case = CASES[name]
    pieces = [
        stored_part(part, source, role, case.format, stored)
        for part, source, rows, columns in matrices
        for role, stored in case.roles(rows, columns).items()
    ]
    return ExpertLayout.stored(pieces, torch.bfloat16)


@needs_triton
def test_outputs_are_those_of_the_dequantised_experts() -> None:
    lines = [json.loads(line) for line in interpret(EXPERTS, json.dumps([JOINED, list(ALLOWED)]))]
    assert [name for name, *_ in lines] == [name for name in CASES if name not in BLOCKS]
    for name, dtype, error, is_dequantised in lines:
        assert error <= ALLOWED[dtype] and is_dequantised, (name, dtype, error)


@needs_triton
def test_blocks_have_the_bits_of_their_formulas_and_types_may_differ_in_an_expert() -> None:
    *bits, error = interpret(IN_BLOCKS)
    assert bits == [f"{name} 1" for name in BLOCKS]
    assert float(error) <= ALLOWED["float32"]


@needs_triton
def test_every_code_has_the_bits_of_its_number() -> None:
    """Signs, the smallest numbers and zeros included, every power of two that a scale can be, and
    numbers as they are."""
    assert interpret(CODES) == ["1 254", "1 248", "1 256", f"1 {253 * 32}", "1 35"]


def test_a_matrix_that_is_not_quantised_is_read_as_it_is() -> None:
    quantised = layout_of("mxfp4")
    plain = Stored(torch.bfloat16, (256, 128))
    pieces = [part for part in quantised.parts if part.name == GATE_UP]
    mixed = ExpertLayout.stored([*pieces, Part(DOWN, *plain)], torch.bfloat16)
    matrices = gated_matrices(mixed)
    assert matrices.down.codes.kind == "plain" and matrices.down.scales is None
    assert (matrices.gate.codes.kind, matrices.up_first) == ("float", 0)
    assert matrices.up.codes.start > matrices.gate.codes.start


def test_words_of_another_type_are_left_to_torch() -> None:
    layout = layout_of("packed, 4 bits, in any order")
    assert is_readable(layout)
    wide = [
        replace(part, dtype=torch.int64) if part.role == "zero_point" else part
        for part in layout.parts
    ]
    assert not is_readable(ExpertLayout.stored(wide, torch.bfloat16))
