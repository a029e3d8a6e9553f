"""One token times experts in published formats and replicas where they lie, beside experts in
bfloat16, by compiled kernels.

    OMP_NUM_THREADS=1 python -m tools.bench.kernels.published
    OMP_NUM_THREADS=1 python -m tools.bench.kernels.published --dtype float16
    OMP_NUM_THREADS=1 python -m tools.bench.kernels.published --only GGUF --ggml FOLDER
    OMP_NUM_THREADS=1 python -m tools.bench.kernels.published --only GGUF --activations 8

Eight experts a call, of models in bfloat16 or in float16. A format and bfloat16 take turns in
rounds, so that what else the machine does falls on both alike; times are of the processor, the
least of all rounds. Experts are cold: each has as many copies as no cache holds, which take turns.
With `--ggml`, a folder with llama.cpp's libraries or a file that is all of them, GGUF's types are
measured beside its products of the same rows, too. With `--activations 8` tokens are rounded.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from artifacts.quantisation.widths import SCALAR_WIDTHS
from moectl.show.render import Sheet, show_sheet
from runtime.backends.cpu.form import CpuForm, TokenOperands
from runtime.backends.cpu.forms_cpu import form_of
from runtime.kernels.load import AS_NUMPY
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.layout import ExpertLayout
from runtime.model.quantised.stored_matrix import stored_matrices
from runtime.tiers.replica_layouts import ReplicaLayout
from tools.arguments import parser_of
from tools.bench.kernels.ggml_products import GgmlProducts
from tools.bench.kernels.stored_matrices import cold_copies, plain_expert, random_expert, variants
from tools.bench.measuring import least_ratio
from tools.gpu.checks.low_bit import random_packed
from tools.gpu.checks.packed import laid_out, replica_layout

SHAPES = ((2048, 768), (2048, 1024))  # hidden, intermediate: Qwen3-30B-A3B's and OLMoE-1B-7B's
NUM_EXPERTS = 8
GROUP = 128
COLD_NBYTES = 96 << 20

MakeExpert = Callable[[int, int], tuple[ExpertLayout | ReplicaLayout, torch.Tensor]]
"""Returns an expert of this hidden size and so many neurons: its layout and its bytes."""


@dataclass(frozen=True, slots=True)
class Result:
    """Stored bits of a weight, and the ratios to bfloat16, by shape; and those to llama.cpp's
    products, where these were measured."""

    name: str
    bits: float
    ratios: dict[tuple[int, int], float]
    over_ggml: dict[tuple[int, int], float]


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    results = [
        measure(
            name,
            make,
            SHAPES,
            rounds=options.rounds,
            dtype=dtype,
            ggml=options.ggml,
            activations=options.activations,
        )
        for name, make in _chosen(options, dtype)
    ]
    show_sheet(sheet(results, rounds=options.rounds, dtype=options.dtype))


def _chosen(options: argparse.Namespace, dtype: torch.dtype) -> list[tuple[str, MakeExpert]]:
    makers = {
        name: partial(random_expert, stored, dtype=dtype)
        for name, stored in variants(GROUP).items()
    }
    makers |= {
        f"replicas, {bits} bits": partial(random_replica, bits) for bits in reversed(SCALAR_WIDTHS)
    }
    if dtype is not torch.bfloat16:
        makers[f"{options.dtype}, not quantised"] = partial(plain_expert, dtype=dtype)
    return [(name, make) for name, make in makers.items() if options.only in name]


def measure(
    name: str,
    make: MakeExpert,
    shapes: Sequence[tuple[int, int]],
    *,
    rounds: int,
    dtype: torch.dtype = torch.bfloat16,
    ggml: str = "",
    activations: int | None = None,
) -> Result:
    """One format in models of this dtype against bfloat16, on experts of each of `shapes`."""
    ratios = {}
    over_ggml = {}
    bits = 0.0
    for hidden, neurons in shapes:
        made = make(hidden, neurons)
        plain = plain_expert(hidden, neurons)
        own = _multiplier(*made, hidden, dtype, activations)
        theirs = _multiplier(*plain, hidden, torch.bfloat16)
        ratios[hidden, neurons] = least_ratio(own, theirs, rounds)
        bits = 16 * made[0].nbytes / plain[0].nbytes
        if ggml and name.startswith("GGUF"):
            theirs = _by_ggml(ggml, *made)
            over_ggml[hidden, neurons] = least_ratio(own, theirs, rounds)
    return Result(name, bits, ratios, over_ggml)


def random_replica(bits: int, hidden: int, neurons: int) -> tuple[ReplicaLayout, torch.Tensor]:
    """The layout and the bytes of a replica of random codes."""
    sizes = {GATE_UP: (2 * neurons, hidden), DOWN: (hidden, neurons)}
    matrices = {name: random_packed(*size, bits, GROUP) for name, size in sizes.items()}
    layout = replica_layout(
        matrices, bits, {name: num_inputs for name, (_, num_inputs) in sizes.items()}
    )
    return layout, laid_out(matrices, layout, "cpu")


def _multiplier(
    layout: ExpertLayout | ReplicaLayout,
    content: torch.Tensor,
    hidden: int,
    dtype: torch.dtype,
    activations: int | None = None,
) -> Callable[[int], None]:
    """A function that multiplies a token by the next `NUM_EXPERTS` of many copies of an expert."""
    form: CpuForm = form_of(layout, dtype, activations=activations)
    next_starts = _cold_starts(layout, content)
    token = torch.randn(hidden).to(dtype).float().numpy()
    y = np.zeros((NUM_EXPERTS, hidden), np.float32)
    like = torch.empty(0, dtype=AS_NUMPY[dtype]).numpy()
    operands = TokenOperands(token, np.arange(NUM_EXPERTS), y, like)

    return lambda turn: form.multiply((), next_starts(turn), operands)


def _by_ggml(folder: str, layout: ExpertLayout, content: torch.Tensor) -> Callable[[int], None]:
    """A function that multiplies by the same experts with llama.cpp's products of rows."""
    next_starts = _cold_starts(layout, content)
    matrices = [each for part in (GATE_UP, DOWN) for each in stored_matrices(layout, part)]
    products = [GgmlProducts(folder, matrix) for matrix in matrices]

    def multiply(turn: int) -> None:
        for start in next_starts(turn):
            for own in products:
                own.multiply(start)

    return multiply


def _cold_starts(
    layout: ExpertLayout | ReplicaLayout, content: torch.Tensor
) -> Callable[[int], list[int]]:
    """A function that returns the addresses of a turn's copies of an expert."""
    copies = cold_copies(layout, content, max(NUM_EXPERTS * layout.nbytes, COLD_NBYTES))

    def starts(turn: int) -> list[int]:
        first = turn * NUM_EXPERTS
        return [copies[(first + i) % len(copies)].data_ptr() for i in range(NUM_EXPERTS)]

    return starts


def sheet(results: Sequence[Result], *, rounds: int, dtype: str = "bfloat16") -> Sheet:
    shapes = list(results[0].ratios)
    sizes = [f"{neurons} x {hidden}" for hidden, neurons in shapes]
    are_beside = any(own.over_ggml for own in results)
    others = [f"over llama.cpp: {size}" for size in sizes] if are_beside else []
    columns = ("format", "bits a weight", *sizes, *others)
    rows = [
        (
            own.name,
            f"{own.bits:.2f}",
            *(f"{own.ratios[shape]:.2f}" for shape in shapes),
            *(f"{own.over_ggml[shape]:.2f}" if own.over_ggml else "" for shape in shapes if others),
        )
        for own in results
    ]
    note = (
        f"time of a token by {NUM_EXPERTS} cold experts over that in bfloat16, least of {rounds} "
        "rounds; one thread"
    )
    return Sheet(
        f"Experts in published formats, and replicas, models in {dtype}", columns, rows, note
    )


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=31, only=("", "formats whose name contains this"))
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16"), help="of the model"
    )
    parser.add_argument("--activations", type=int, choices=(8,), help="bits of tokens")
    parser.add_argument(
        "--ggml",
        default="",
        help="llama.cpp: folder of libggml-base.so and libggml-cpu.so, or a file with both",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
