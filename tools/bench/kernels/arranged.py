"""Extra cost of a load where codes are put into another order: that of their groups where
activations order the inputs, and GPTQ's for AWQ's.

    OMP_NUM_THREADS=1 python -m tools.bench.kernels.arranged

Experts lie in a file that is in the page cache and larger than the processor's caches. Each round
reads the next one into a slot, as the disk link does, and then arranges it there; both are timed
apart.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moectl.show.render import Sheet, show_sheet
from runtime.model.layout import aligned
from tools.arguments import parser_of
from tools.bench.kernels.published import COLD_NBYTES, GROUP, SHAPES
from tools.bench.kernels.stored_matrices import Stored, stored_expert, variants


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds of the processor for an expert, medians: reading it, and arranging it."""

    name: str
    nbytes: int
    read_ms: float
    arrange_ms: float


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    hidden, neurons = SHAPES[0]
    chosen = {
        name: stored
        for name, stored in variants(GROUP).items()
        if name.endswith(("activations", "desc_act", "AWQ"))
    }
    results = [
        measure(name, stored, hidden, neurons, rounds=options.rounds)
        for name, stored in chosen.items()
    ]
    show_sheet(sheet(results, hidden, neurons, rounds=options.rounds))


def measure(name: str, stored: Stored, hidden: int, neurons: int, *, rounds: int) -> Result:
    """One format, on experts of one shape."""
    layout, content = stored_expert(stored, hidden, neurons, torch.bfloat16)
    count = max(2, COLD_NBYTES // layout.nbytes)
    slot = aligned(layout.nbytes)
    target = memoryview(slot.numpy())
    read_ms = []
    arrange_ms = []
    with tempfile.TemporaryFile() as file:
        for _ in range(count):
            file.write(content[: layout.nbytes].numpy())
        file.flush()
        for turn in range(rounds + 1):
            begin_s = time.thread_time()
            os.preadv(file.fileno(), [target], turn % count * layout.nbytes)
            read_s = time.thread_time()
            assert layout.arrange(slot) is None, f"{name} with an index beyond its groups"
            read_ms.append(1e3 * (read_s - begin_s))
            arrange_ms.append(1e3 * (time.thread_time() - read_s))
    return Result(
        name, layout.nbytes, *(statistics.median(times[1:]) for times in (read_ms, arrange_ms))
    )


def sheet(results: Sequence[Result], hidden: int, neurons: int, *, rounds: int) -> Sheet:
    columns = ("format", "MB", "read, ms", "arrange, ms", "arrange / read")
    rows = [
        (
            own.name,
            *(f"{each:.2f}" for each in (own.nbytes / 1e6, own.read_ms, own.arrange_ms)),
            f"{own.arrange_ms / own.read_ms:.1f}",
        )
        for own in results
    ]
    expert = f"one expert of {neurons} x {hidden} x 3 out of the page cache"
    note = f"{expert}, medians of {rounds} rounds, of the processor; one thread"
    return Sheet("Loads of codes that are put into order", columns, rows, note)


def _options() -> argparse.Namespace:
    return parser_of(__doc__, rounds=101).parse_args()


if __name__ == "__main__":
    main()
