"""One token times experts in published formats and replicas where they lie, beside experts in bfloat16, by compiled
kernels.

    OMP_NUM_THREADS=1 python -m tools.bench.published

Eight experts a call. A format and bfloat16 take turns in rounds, so that what else the machine does falls on both
alike; times are of the processor, the least of all rounds. Experts are cold: each has as many copies as no cache holds,
which take turns.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from artifacts.quantisation.widths import WIDTHS
from moectl.show.render import Sheet, show_sheet
from runtime.engine.form import CpuForm
from runtime.engine.forms_cpu import form_of
from runtime.engine.token_operands import TokenOperands
from runtime.kernels.load import AS_NUMPY
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.expert_store import StoredLayout
from runtime.model.layout import ExpertLayout, aligned
from runtime.tiers.replicas import ReplicaLayout
from tools.bench.stored_matrices import random_expert, variants
from tools.gpu.checks.low_bit import laid_out, random_packed, replica_layout

SHAPES = ((2048, 768), (2048, 1024))  # hidden, intermediate: Qwen3-30B-A3B's and OLMoE-1B-7B's
NUM_EXPERTS, GROUP = 8, 128
COLD_NBYTES = 96 << 20

MakeExpert = Callable[[int, int], tuple[StoredLayout | ReplicaLayout, torch.Tensor]]
"""Returns an expert of this hidden size and so many neurons: its layout and its bytes."""


@dataclass(frozen=True, slots=True)
class Result:
    """Stored bits of a weight, and the ratios to bfloat16, by shape."""

    name: str
    bits: float
    ratios: dict[tuple[int, int], float]


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    makers = {name: partial(random_expert, stored, dtype=torch.bfloat16) for name, stored in variants(GROUP).items()}
    makers |= {f"replicas, {bits} bits": partial(random_replica, bits) for bits in reversed(WIDTHS)}
    chosen = {name: make for name, make in makers.items() if options.only in name}
    results = [measure(name, make, SHAPES, rounds=options.rounds) for name, make in chosen.items()]
    show_sheet(sheet(results, rounds=options.rounds))


def measure(name: str, make: MakeExpert, shapes: Sequence[tuple[int, int]], *, rounds: int) -> Result:
    """One format against bfloat16, on experts of each of `shapes`."""
    ratios, bits = {}, 0.0
    for hidden, neurons in shapes:
        layout, content = make(hidden, neurons)
        own = _multiplier(layout, content, hidden)
        plain_layout, plain = bfloat16_expert(hidden, neurons)
        ratios[hidden, neurons] = _ratio(own, _multiplier(plain_layout, plain, hidden), rounds)
        bits = 16 * layout.nbytes / plain_layout.nbytes
    return Result(name, bits, ratios)


def random_replica(bits: int, hidden: int, neurons: int) -> tuple[ReplicaLayout, torch.Tensor]:
    """The layout and the bytes of a replica of random codes."""
    sizes = {GATE_UP: (2 * neurons, hidden), DOWN: (hidden, neurons)}
    matrices = {name: random_packed(*size, bits, GROUP) for name, size in sizes.items()}
    layout = replica_layout(matrices, bits, {name: num_inputs for name, (_, num_inputs) in sizes.items()})
    return layout, laid_out(matrices, layout)


def bfloat16_expert(hidden: int, neurons: int) -> tuple[ExpertLayout, torch.Tensor]:
    layout = ExpertLayout.of({GATE_UP: (2 * neurons, hidden), DOWN: (hidden, neurons)}, torch.bfloat16)
    content = aligned(layout.nbytes)
    for part in layout.views(content).values():
        part.normal_(std=0.02)
    return layout, content


def _multiplier(layout: StoredLayout | ReplicaLayout, content: torch.Tensor, hidden: int) -> Callable[[], None]:
    """A function that multiplies a token by the next `NUM_EXPERTS` of many copies of an expert."""
    form: CpuForm = form_of(layout, torch.bfloat16)
    copies = aligned(max(NUM_EXPERTS, COLD_NBYTES // layout.nbytes) * layout.nbytes).view(-1, layout.nbytes)
    copies[:] = content[: layout.nbytes]
    token = torch.randn(hidden).bfloat16().float().numpy()
    y, like = np.zeros((NUM_EXPERTS, hidden), np.float32), torch.empty(0, dtype=AS_NUMPY[torch.bfloat16]).numpy()
    operands, first = TokenOperands(token, np.arange(NUM_EXPERTS), y, like), 0

    def multiply() -> None:
        nonlocal first
        starts = [copies[(first + i) % len(copies)].data_ptr() for i in range(NUM_EXPERTS)]
        first += NUM_EXPERTS
        form.multiply((), starts, operands)

    return multiply


def _ratio(own: Callable[[], None], plain: Callable[[], None], rounds: int) -> float:
    """The least time of `own` by the least of `plain`, in rounds; the first warms up."""
    times = [(_seconds(own), _seconds(plain)) for _ in range(rounds + 1)][1:]
    return min(mine for mine, _ in times) / min(theirs for _, theirs in times)


def _seconds(work: Callable[[], None]) -> float:
    begin_s = time.thread_time()
    work()
    return time.thread_time() - begin_s


def sheet(results: Sequence[Result], *, rounds: int) -> Sheet:
    shapes = list(results[0].ratios)
    columns = ("format", "bits a weight", *(f"{neurons} x {hidden}" for hidden, neurons in shapes))
    rows = [(own.name, f"{own.bits:.2f}", *(f"{own.ratios[shape]:.2f}" for shape in shapes)) for own in results]
    note = f"time of a token by {NUM_EXPERTS} cold experts over that in bfloat16, least of {rounds} rounds; one thread"
    return Sheet("Experts in published formats, and replicas", columns, rows, note)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--only", default="", help="formats whose name contains this")
    return parser.parse_args()


if __name__ == "__main__":
    main()
