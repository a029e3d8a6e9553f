"""Batches with experts on disk and less memory than the model has: moectl beside transformers'
batch by Accelerate.

    python -m tools.bench.disk.batch --write docs/generate.md

Every program has the same memory, page cache included, in a control group of Linux, which takes
root. The model is random, four layers of OLMoE's size in bfloat16 (3.3 GB, in the fused layout that
Accelerate reads directly), written to a temporary folder. Programs take turns in rounds, each in a
process of its own that begins with nothing in the page cache.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from artifacts.errors import BadInput
from tools.arguments import parser_of
from tools.bench.decoding.resident import OLMOE_SIZED, random_model
from tools.bench.disk.memory_limit import LimitedReadings, limited_rounds
from tools.bench.disk.way import BATCH_PROMPT, DEVICE_MAP, OURS, Way
from tools.bench.measuring import weights_nbytes
from tools.bench.performance import Ratio, Section, Table, publish

PRESETS = ("on-demand", "horizon")
THEIRS = (Way(DEVICE_MAP), Way(DEVICE_MAP, experts="grouped_mm"))


def main() -> int:
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        with random_model("--layers", "4", *OLMOE_SIZED[2:], "--layout", "fused") as folder:
            section = Section("disk-batch", [_measured(folder, options)])
    except BadInput as problem:
        print(problem, file=sys.stderr)
        return 3
    publish(section, options.write, " ".join(["python -m tools.bench.disk.batch", *sys.argv[1:]]))
    return 0


def _measured(folder: Path, options: argparse.Namespace) -> Table:
    ours = [
        Way(OURS, budget, "direct", "exact", preset=name, scope=None)
        for budget in options.budgets
        for name in PRESETS
    ]
    found = limited_rounds(
        "batch",
        dict.fromkeys((*THEIRS, *ours), (folder, options.rows, options.tokens)),
        rounds=options.rounds,
        memory_gib=options.memory,
        folders=[folder],
    )
    theirs = [min(each) for each in zip(*(found[way].of("seconds") for way in THEIRS), strict=True)]
    num_tokens = options.rows * options.tokens
    rows = [_row(way, num_tokens, own, theirs) for way, own in found.items()]
    note = (
        f"medians of {options.rounds} rounds; {options.rows} requests together, {BATCH_PROMPT} tokens "
        f"of prompt and {options.tokens} of answer each, one thread; file of "
        f"{weights_nbytes(folder) / 2**30:.1f} GiB; "
        "times: the tokens/s over those of the faster of the other program's ways in the same "
        "round; GiB: read from the device; peak: with the page cache"
    )
    columns = ("program", "tokens/s", "times", "GiB", "peak, GiB")
    return Table(
        f"A batch of {options.rows} from disk, in {options.memory:g} GiB", columns, rows, note
    )


def _row(way: Way, num_tokens: int, own: LimitedReadings, theirs: Sequence[float]) -> tuple:
    return (
        f"{way.label}, {way.preset if way.name == OURS else way.experts}",
        f"{num_tokens / own.median('seconds'):.1f}",
        f"{Ratio.of(theirs, own.of('seconds')).median:.2f}",
        f"{own.median('read_nbytes') / 2**30:.1f}",
        f"{own.peak_nbytes / 2**30:.2f}",
    )


def _options() -> argparse.Namespace:
    return parser_of(
        __doc__,
        rows=(64, "requests together"),
        tokens=(16, "of each answer"),
        memory=(2.0, "GiB of each program"),
        budgets=(["25%"], "of moectl"),
        rounds=3,
        write=(Path, "put the table into this page"),
    ).parse_args()


if __name__ == "__main__":
    sys.exit(main())
