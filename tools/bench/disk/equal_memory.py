"""Decoding with less memory than the model has: moectl's experts from disk beside llama.cpp's
mapped file.

    python -m tools.bench.disk.equal_memory --write docs/lab/disk.md

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
import sys
import tempfile
from pathlib import Path

from artifacts.errors import BadInput
from tools.arguments import parser_of
from tools.bench.disk.memory_limit import LimitedReadings, limited_rounds
from tools.bench.disk.way import LLAMA_CPP, OURS, PROMPT, Way
from tools.bench.measuring import output_of, weights_nbytes
from tools.bench.performance import Ratio, Section, Table, publish
from tools.make.full_size import make

MODEL = "qwen3-30b-a3b-fp8"
CHANGES = {"num_hidden_layers": 12}
THEIRS = Way(LLAMA_CPP)
WAYS = tuple(Way(OURS, "25%", link, "fused") for link in ("disk", "direct"))


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
    given = f"--memory {options.memory} --rounds {options.rounds} --tokens {options.tokens}"
    command = f"python -m tools.bench.disk.equal_memory {given} --write {options.write}"
    publish(section, options.write, command)
    return 0


def _files(folder: Path) -> tuple[Path, Path]:
    """The checkpoint and llama.cpp's file in `folder`, made unless they are there."""
    checkpoint = folder / "checkpoint"
    file = folder / "model.gguf"
    if not (checkpoint / "config.json").is_file():
        make(MODEL, checkpoint, changes=CHANGES)
    if not file.is_file():
        asked = ["--what", "gguf", "--type", "q8_0", "--out"]
        print(output_of("moectl", "export", checkpoint, *asked, file), end="")
    return checkpoint, file


def _measured(checkpoint: Path, file: Path, options: argparse.Namespace) -> Table:
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    ways = {THEIRS: file} | dict.fromkeys(WAYS, checkpoint)
    found = limited_rounds(
        "twice",
        {way: (path, vocab_size, options.tokens) for way, path in ways.items()},
        rounds=options.rounds,
        memory_gib=options.memory,
        folders=[checkpoint, file.parent],
    )
    gib = [nbytes / 2**30 for nbytes in (weights_nbytes(checkpoint), file.stat().st_size)]
    note = (
        f"medians over {options.rounds} rounds; {PROMPT} tokens of prompt, {options.tokens} "
        f"decoded, one thread; files of {gib[0]:.1f} GiB (FP8, weights besides experts in "
        f"bfloat16) and {gib[1]:.1f} GiB (all in Q8_0); ratios to llama.cpp of the same round; "
        "first token: from before the model is opened, with nothing in the page cache; GiB: read "
        "from the device for the prompt and the tokens after it, the second time; peak: with the "
        "page cache"
    )
    return Table(
        f"{MODEL}, {CHANGES['num_hidden_layers']} layers, in {options.memory:g} GiB",
        ("program", "first token, s", "ratio", "ms/token", "ratio", "GiB", "peak, GiB"),
        [_row(way, own, found[THEIRS]) for way, own in found.items()],
        note,
    )


def _row(way: Way, own: LimitedReadings, theirs: LimitedReadings) -> tuple:
    first, token = (
        Ratio.of(own.of(name), theirs.of(name)).median for name in ("first_s", "token_s")
    )
    return (
        way.label,
        f"{own.median('first_s'):.1f}",
        f"{first:.2f}",
        f"{own.median('token_s') * 1e3:.0f}",
        f"{token:.2f}",
        f"{own.median('read_nbytes') / 2**30:.1f}",
        f"{own.peak_nbytes / 2**30:.1f}",
    )


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
