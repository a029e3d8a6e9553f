"""Decoding with less memory than the model has: moectl's experts from disk beside llama.cpp's
mapped file.

    python -m tools.bench.disk.equal_memory --write docs/disk.md

Every program has the same memory, page cache included, in a control group of Linux, which takes
root. The model is Qwen3-30B-A3B in FP8 with a quarter of its layers and random weights, written to
a temporary folder, and the same model as a GGUF file of Q8_0; 20 GB of disk. Programs take turns in
rounds, each in a process of its own that begins with nothing in the page cache. It then reads the
same tokens twice: the first decoded token of the first reading shows how long one waits, the second
reading how fast it goes on.
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from artifacts.errors import BadInput
from tools.arguments import parser_of
from tools.bench import performance
from tools.bench.decoding.resident import PROMPT
from tools.bench.disk.equal_memory_way import LimitedReading, LimitedWay
from tools.bench.disk.memory_limit import process_environment, run_limited
from tools.bench.disk.way import drop
from tools.bench.performance import Ratio, Section, Table
from tools.make.full_size import make

log = logging.getLogger("bench_equal_memory")

MODEL = "qwen3-30b-a3b-fp8"
CHANGES = {"num_hidden_layers": 12}
BUDGETS = ("25%",)
LINKS = ("disk", "direct")


def main() -> int:
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        with tempfile.TemporaryDirectory(prefix="moectl-equal-memory-") as scratch:
            folder, file = _files(options.keep or Path(scratch))
            section = Section("equal-memory", [_measured(folder, file, options)])
    except BadInput as problem:
        print(problem, file=sys.stderr)
        return 3
    print(section.tables[0].markdown())
    if options.write:
        given = f"--memory {options.memory} --rounds {options.rounds} --tokens {options.tokens}"
        command = f"python -m tools.bench.disk.equal_memory {given} --write {options.write}"
        performance.write(options.write, [section], performance.conditions(command))
    return 0


def _files(folder: Path) -> tuple[Path, Path]:
    """The checkpoint and llama.cpp's file in `folder`, made unless they are there."""
    checkpoint = folder / "checkpoint"
    file = folder / "model.gguf"
    if not (checkpoint / "config.json").is_file():
        make(MODEL, checkpoint, changes=CHANGES)
    if not file.is_file():
        command = [
            "moectl",
            "export",
            str(checkpoint),
            "--what",
            "gguf",
            "--type",
            "q8_0",
            "--out",
            str(file),
        ]
        subprocess.run([sys.executable, "-m", *command], env=process_environment(), check=True)
    return checkpoint, file


def _measured(checkpoint: Path, file: Path, options: argparse.Namespace) -> Table:
    limit = int(options.memory * 2**30)
    llama_cpp = LimitedWay(str(file))
    ways = [
        llama_cpp,
        *(LimitedWay(str(checkpoint), budget, link) for budget in BUDGETS for link in LINKS),
    ]
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    found: dict[LimitedWay, list[LimitedReading]] = {way: [] for way in ways}
    peaks = dict.fromkeys(ways, 0)
    for turn in range(options.rounds):
        start = turn % len(ways)
        for way in (*ways[start:], *ways[:start]):
            drop(checkpoint, file.parent)
            arguments = (json.dumps(asdict(way)), str(vocab_size), str(options.tokens))
            command = [sys.executable, "-m", "tools.bench.disk.equal_memory_way", *arguments]
            done = run_limited(command, limit, environment=process_environment())
            found[way].append(LimitedReading(**json.loads(done.output.strip().rpartition("\n")[2])))
            peaks[way] = max(peaks[way], done.peak_nbytes)
            log.info("round %d: %s: %s", turn + 1, way.label, found[way][-1])
    rows = [_row(way, found[way], found[llama_cpp], peaks[way]) for way in ways]
    gib = [
        sum(each.stat().st_size for each in files) / 2**30
        for files in (checkpoint.glob("*.safetensors"), [file])
    ]
    note = (
        f"medians over {options.rounds} rounds; {PROMPT} tokens of prompt, {options.tokens} "
        f"decoded, one thread; files of {gib[0]:.1f} GiB (FP8, weights besides experts in "
        f"bfloat16) and {gib[1]:.1f} GiB (all in Q8_0); ratios to llama.cpp of the same round; "
        "first token: from before the model is opened, with nothing in the page cache; GiB: read "
        "from the device for the prompt and the tokens after it, the second time; peak: with the "
        "page cache"
    )
    columns = ("program", "first token, s", "ratio", "ms/token", "ratio", "GiB", "peak, GiB")
    return Table(
        f"{MODEL}, {CHANGES['num_hidden_layers']} layers, in {options.memory:g} GiB",
        columns,
        rows,
        note,
    )


def _row(
    way: LimitedWay, own: Sequence[LimitedReading], beside: Sequence[LimitedReading], peak: int
) -> tuple:
    first, token = (
        Ratio.of([getattr(one, name) for one in own], [getattr(one, name) for one in beside]).median
        for name in ("first_s", "token_s")
    )
    seconds, token_s, nbytes = (
        median(getattr(one, name) for one in own) for name in LimitedReading.__slots__
    )
    cells = (
        f"{seconds:.1f}",
        f"{first:.2f}",
        f"{token_s * 1e3:.0f}",
        f"{token:.2f}",
        f"{nbytes / 2**30:.1f}",
    )
    return (way.label, *cells, f"{peak / 2**30:.1f}")


def _options() -> argparse.Namespace:
    return parser_of(
        __doc__,
        memory=(4.5, "GiB of each program"),
        rounds=3,
        tokens=24,
        keep=(Path, "folder where both files are, or are made, and stay"),
        write=(Path, "page whose section is written"),
    ).parse_args()


if __name__ == "__main__":
    sys.exit(main())
