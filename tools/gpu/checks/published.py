"""Checks of the kernels for experts in the published formats: every format against its formula, and
its speed."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from runtime.backends.triton.forms_gpu import full_form
from runtime.control.plan import Place
from runtime.kernels.gates import SILU
from runtime.kernels.gpu.addressing import BLOCKS
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.layout import ExpertLayout, stored_part
from tools.bench.kernels.stored_matrices import random_blocks
from tools.gpu.checks import formats
from tools.gpu.checks.formats import CASES, Case, random_content
from tools.gpu.checks.sessions import Finding
from tools.gpu.timing import microseconds

SIZES = (2048, 1024, 8)  # hidden, neurons, ranks of OLMoE-1B-7B
ALLOWED = 1e-5  # relative to the outputs of the dequantised weights in float64, by norm
_CALLS = 100


class PublishedExperts:
    """Random experts of one format, consecutive in a buffer as in slots; gate and up are two
    matrices, or one where `is_joined`."""

    def __init__(
        self,
        case: Case,
        sizes: tuple[int, int, int],
        *,
        count: int,
        dtype: torch.dtype,
        device: str,
        is_joined: bool = False,
    ) -> None:
        self.hidden, self.neurons, self.top_k = sizes
        self.dtype = dtype
        self._format = case.format
        self.device = device
        joined = [(GATE_UP, 0, 2 * self.neurons, self.hidden)]
        apart = [(GATE_UP, source, self.neurons, self.hidden) for source in range(2)]
        matrices = [*(joined if is_joined else apart), (DOWN, 0, self.hidden, self.neurons)]
        pieces = [
            stored_part(part, source, role, case.format, stored)
            for part, source, rows, columns in matrices
            for role, stored in case.roles(rows, columns).items()
        ]
        self.layout = ExpertLayout.stored(pieces, dtype)
        self._random = torch.Generator().manual_seed(0)
        self._buffer = torch.zeros(count * self.layout.nbytes, dtype=torch.uint8, device=device)
        self._slots = self._buffer.split(self.layout.nbytes)
        for slot in self._slots:
            slot.copy_(self._expert())
        starts = [number * self.layout.nbytes for number in range(count)]
        self.form = full_form(SILU, self.layout, self._buffer, starts)

    def _expert(self) -> torch.Tensor:
        """The bytes of a random expert, as a load brings them."""
        content = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
        for name, matrices in self.layout.views(content).items():
            num_groups = (self.hidden if name == GATE_UP else self.neurons) // formats.GROUP
            for matrix in matrices:
                if self._format.name in BLOCKS:
                    blocks = matrix.tensors["blocks"]
                    own = random_blocks(self._format, *self._format.shape(matrix.tensors))
                    blocks.copy_(own["blocks"])
                    continue
                for role, tensor in matrix.tensors.items():
                    tensor.copy_(random_content(role, tensor, num_groups, self._random))
        assert self.layout.arrange(content) is None, (
            f"{self.layout.format} with an index beyond its groups"
        )
        return content

    def numbers(self, turn: int) -> torch.Tensor:
        """The numbers [1, K] of the experts of a turn."""
        first = turn * self.top_k
        return torch.arange(first, first + self.top_k, dtype=torch.int32, device=self.device)[None]

    def outputs(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Outputs [T * K, H] by the kernels: x [T, H], numbers [T, K]."""
        y = torch.empty(numbers.numel(), self.hidden, device=self.device)
        self.form.multiply(x, numbers, y)
        return y

    def by_formula(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The same in float64, on the weights that the formula gives."""
        rows = numbers.tolist()
        pairs = (
            (token, number) for token, each in zip(x.double(), rows, strict=True) for number in each
        )
        return torch.stack(
            [_expert(token, self.layout.weights(self._slots[number])) for token, number in pairs]
        )

    def is_dequantised(self, number: int) -> bool:
        """Return whether the kernel gives the bits of the formula."""
        ours = self.form.weights(Place(0, number))
        theirs = self.layout.weights(self._slots[number])
        return all(torch.equal(ours[name], theirs[name]) for name in theirs)

    def plain(self) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """Return a function that multiplies by the same number of experts of the same sizes in
        `dtype`, with the kernels for that dtype."""
        shapes = {GATE_UP: (2 * self.neurons, self.hidden), DOWN: (self.hidden, self.neurons)}
        layout = ExpertLayout.of(shapes, self.dtype)
        count = len(self._slots)
        arena = torch.zeros(count * layout.nbytes, dtype=torch.uint8, device=self.device)
        form = full_form(SILU, layout, arena, [number * layout.nbytes for number in range(count)])
        y = torch.empty(self.top_k, self.hidden, device=self.device)
        return lambda x, numbers: form.multiply(x, numbers, y)


def published(
    device: str,
    name: str,
    *,
    sizes: tuple[int, int, int] = SIZES,
    turns: int = 4,
    calls: int = _CALLS,
) -> Finding:
    """Passed if a kernel dequantises an expert to the bits of the formula and outputs of a token
    agree with it.

    The figures are microseconds of a token's experts, beside the same number in bfloat16, and of
    dequantising one.
    """
    top_k = sizes[2]
    exact = PublishedExperts(CASES[name], sizes, count=top_k, dtype=torch.float32, device=device)
    x = torch.randn(1, sizes[0], generator=torch.Generator(device).manual_seed(1), device=device)
    ours = exact.outputs(x, exact.numbers(0))
    theirs = exact.by_formula(x, exact.numbers(0))
    relative = ((ours - theirs).norm() / theirs.norm()).item()
    is_equal = exact.is_dequantised(0)
    narrow = PublishedExperts(
        CASES[name], sizes, count=top_k * turns, dtype=torch.bfloat16, device=device
    )
    numbers = [narrow.numbers(turn) for turn in range(turns)]
    plain = narrow.plain()
    x = x.bfloat16()
    us, plain_us = (
        microseconds(lambda turn, way=way: way(x, numbers[turn]), turns, calls, device)
        for way in (narrow.outputs, plain)
    )
    one_us = microseconds(lambda turn: narrow.form.weights(Place(0, turn)), turns, calls, device)
    figures = {
        "relative": relative,
        "bits_equal": is_equal,
        "us": us,
        "bfloat16_us": plain_us,
        "dequantise_us": one_us,
    }
    told = f"{us:.0f} us, {us / plain_us:.2f} of bfloat16; one dequantised in {one_us:.0f} us"
    detail = (
        f"{told} to {'equal' if is_equal else 'OTHER'} bits; relative difference {relative:.1e}"
    )
    return relative <= ALLOWED and is_equal, detail, figures | {"nbytes": exact.layout.nbytes}


def _expert(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    gate, up = F.linear(x, weights[GATE_UP].double()).chunk(2)
    return F.linear(F.silu(gate) * up, weights[DOWN].double())
