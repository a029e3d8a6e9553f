"""Batches with experts on disk and less memory than the model has: moectl beside transformers'
batch by Accelerate.

    python -m tools.bench.disk.batch --write docs/generate.md

Every program has the same memory, page cache included, in a control group of Linux, which takes
root. The model is random, four layers of OLMoE's size in bfloat16 (3.3 GB, in the fused layout that
Accelerate reads directly), written to a temporary folder. Programs take turns in rounds, each in a
process of its own that begins with nothing in the page cache.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from artifacts.errors import BadInput
from tools.arguments import parser_of
from tools.bench import performance
from tools.bench.decoding.resident import OLMOE_SIZED, random_model
from tools.bench.disk.batch_way import PROMPT, BatchReading, BatchWay
from tools.bench.disk.memory_limit import process_environment, run_limited
from tools.bench.disk.way import DEVICE_MAP, OURS, Way, drop
from tools.bench.performance import Ratio, Section, Table

log = logging.getLogger("bench_disk_batch")

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
    print(section.tables[0].markdown())
    if options.write:
        command = " ".join(["python -m tools.bench.disk.batch", *sys.argv[1:]])
        performance.write(options.write, [section], performance.conditions(command))
    return 0


def _measured(folder: Path, options: argparse.Namespace) -> Table:
    ours = [
        Way(OURS, budget, "direct", "exact", preset=name, scope=None)
        for budget in options.budgets
        for name in PRESETS
    ]
    ways = [BatchWay(way, options.rows, options.tokens) for way in (*THEIRS, *ours)]
    found: dict[BatchWay, list[BatchReading]] = {way: [] for way in ways}
    peaks = dict.fromkeys(ways, 0)
    for turn in range(options.rounds):
        start = turn % len(ways)
        for way in (*ways[start:], *ways[:start]):
            drop(folder)
            command = [
                sys.executable,
                "-m",
                "tools.bench.disk.batch_way",
                json.dumps(asdict(way)),
                str(folder),
            ]
            done = run_limited(
                command, int(options.memory * 2**30), environment=process_environment()
            )
            found[way].append(BatchReading(**json.loads(done.output.strip().rpartition("\n")[2])))
            peaks[way] = max(peaks[way], done.peak_nbytes)
            log.info("round %d: %s: %s", turn + 1, way.way.label, found[way][-1])
    theirs = [
        min(each, key=lambda one: one.seconds)
        for each in zip(*(found[way] for way in ways[:2]), strict=True)
    ]
    rows = [_row(way, found[way], theirs, peaks[way]) for way in ways]
    gib = sum(each.stat().st_size for each in folder.glob("*.safetensors")) / 2**30
    note = (
        f"medians of {options.rounds} rounds; {options.rows} requests together, {PROMPT} tokens "
        f"of prompt and {options.tokens} of answer each, one thread; file of {gib:.1f} GiB; "
        "times: the tokens/s over those of the faster of the other program's ways in the same "
        "round; GiB: read from the device; peak: with the page cache"
    )
    columns = ("program", "tokens/s", "times", "GiB", "peak, GiB")
    return Table(
        f"A batch of {options.rows} from disk, in {options.memory:g} GiB", columns, rows, note
    )


def _row(
    way: BatchWay, own: Sequence[BatchReading], theirs: Sequence[BatchReading], peak: int
) -> tuple:
    seconds, nbytes = (median(getattr(one, name) for one in own) for name in BatchReading.__slots__)
    times = Ratio.of([one.seconds for one in theirs], [one.seconds for one in own]).median
    label = f"{way.way.label}, {way.way.preset if way.way.name == OURS else way.way.experts}"
    return (
        label,
        f"{way.rows * way.tokens / seconds:.1f}",
        f"{times:.2f}",
        f"{nbytes / 2**30:.1f}",
        f"{peak / 2**30:.2f}",
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
