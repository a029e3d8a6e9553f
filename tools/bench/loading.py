"""How fast experts are read from the page cache into memory: by a thread a core, as sessions read
them, and beside it one after another, with torch's threads for the checks.

    python -m tools.bench.loading --model FOLDER

Ways take turns, round by round, each on the first cores that the process may use. Memory is written
once before it is measured, because a virtual machine may be given it only then. CPU time is that of
all threads.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from moectl.show.render import Sheet, show_sheet
from runtime.model.layout import ExpertStore, aligned, round_up
from runtime.model.open import open_model
from runtime.tiers.ram import RamStore
from tools.arguments import parser_of
from tools.bench.measuring import in_turns

Reading = tuple[float, float]  # GB/s and seconds of CPU time a GiB


def main() -> None:
    options = _options()
    cores = sorted(os.sched_getaffinity(0))
    counts = sorted({1, len(cores)})
    ways = [(name, count) for count in counts for name in WAYS]
    found: dict[tuple[str, int], list[Reading]] = {way: [] for way in ways}
    for _, way in in_turns(ways, options.rounds):
        name, count = way
        os.sched_setaffinity(0, cores[:count])
        torch.set_num_threads(count)
        found[way].append(_measured(open_model(str(options.model)).store, WAYS[name]))
        os.sched_setaffinity(0, cores)
    show_sheet(_sheet(found, options.rounds))


def one_after_another(store: ExpertStore) -> torch.Tensor:
    """Read every expert on the calling thread; torch checks each on its own threads."""
    stride = round_up(store.layout.nbytes)
    buffer = aligned(store.shape.num_keys * stride).view(-1, stride)
    for key in range(store.shape.num_keys):
        store.read(*divmod(key, store.shape.num_experts), buffer[key])
    return buffer


WAYS: dict[str, Callable[[ExpertStore], torch.Tensor]] = {
    "one after another": one_after_another,
    "a thread a core": lambda store: RamStore(store).buffer,
}


def _measured(store: ExpertStore, read: Callable[[ExpertStore], torch.Tensor]) -> Reading:
    nbytes = store.shape.num_keys * round_up(store.layout.nbytes)
    aligned(nbytes).fill_(1)
    begin_s = time.perf_counter()
    begin_cpu_s = time.process_time()
    read(store)
    cpu_s = time.process_time() - begin_cpu_s
    reading = nbytes / 1e9 / (time.perf_counter() - begin_s), cpu_s / (nbytes / 2**30)
    store.close()
    return reading


def _sheet(found: dict[tuple[str, int], list[Reading]], rounds: int) -> Sheet:
    cells = []
    for (name, count), readings in found.items():
        rates, cpu = zip(*readings, strict=True)
        cells.append(
            (
                name,
                f"{count}",
                f"{statistics.median(rates):.2f}",
                f"{min(rates):.2f} to {max(rates):.2f}",
                f"{statistics.median(cpu):.2f}",
            )
        )
    columns = ("way", "cores", "GB/s", "least to most", "CPU s/GiB")
    return Sheet("Reading experts from the page cache", columns, cells, f"{rounds} rounds")


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
