"""Checkpoints of full size from disk: opening, decoding at several budgets, a prompt, a profile,
and what was planned.

    python -m tools.bench.disk.full_size --write docs/lab/full-size.md

writes gpt-oss-20b in MXFP4 and Qwen3-30B-A3B in FP8 with random weights, one after the other, to a
temporary folder that needs 36 GB, measures each in processes of its own on one thread, and deletes
it. `--keep FOLDER` leaves the checkpoints there, and uses those that it finds.
"""

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tools.arguments import parser_of
from tools.bench import performance
from tools.bench.disk.full_size_process import (
    Cell,
    Decoded,
    FullSizeMeasurement,
    FullSizeRequest,
    Opening,
    Prompted,
)
from tools.bench.disk.full_size_tables import Rehearsal, tables
from tools.bench.measuring import output_of, weights_nbytes
from tools.bench.performance import Section
from tools.make.full_size import entries, make
from tools.make.published_configs import CONFIGS

log = logging.getLogger("bench_full_size")

BUDGETS = ("12.5%", "25%", "50%")
OF_PROMPT = "25%"
_SPARE_NBYTES = 2 << 30  # of the disk, to be left free
_TEXT = (
    "Experts that do not fit into memory stay on disk and are read when a router asks for them. "
    * 4
)


def main() -> None:
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    told = performance.conditions(
        f"python -m tools.bench.disk.full_size {' '.join(_given(options))}"
    )
    for name in options.model or CONFIGS:
        with checkpoint(name, changes={}, keep=options.keep) as folder:
            section = Section(
                name, tables(rehearse(folder, _request(options), profiled=options.profiled))
            )
        print("\n\n".join(table.markdown() for table in section.tables), flush=True)
        if options.write:
            performance.write(options.write, [section], told)


@contextmanager
def checkpoint(name: str, *, changes: Mapping[str, int], keep: Path | None) -> Iterator[Path]:
    """The checkpoint in a temporary folder, or in `keep`, where it stays and is made only if it is
    not there."""
    with tempfile.TemporaryDirectory(prefix="moectl-full-size-") as scratch:
        folder = (keep or Path(scratch)) / name
        if not (folder / "config.json").is_file():
            _check_room(name, changes, folder.parent)
            begin_s = time.perf_counter()
            nbytes = make(name, folder, changes=changes)
            log.info("%s: %d bytes written in %.0f s", name, nbytes, time.perf_counter() - begin_s)
        yield folder


def _check_room(name: str, changes: Mapping[str, int], folder: Path) -> None:
    needed = sum(entry.nbytes for entry in entries(CONFIGS[name](changes))) + _SPARE_NBYTES
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        sys.exit(
            f"{name} needs {needed / 1e9:.0f} GB of disk, and {folder} has {free / 1e9:.0f} GB: "
            "set TMPDIR"
        )


def rehearse(folder: Path, request: FullSizeRequest, *, profiled: int) -> Rehearsal:
    """Measure the checkpoint in `folder`: in a process of its own, by a profile of `profiled`
    tokens, and by the plan."""
    found = json.loads(
        _python("tools.bench.disk.full_size_process", folder, json.dumps(asdict(request)))
    )
    measured = _measurement(found)
    log.info("%s: %s", folder.name, measured)
    begin_s = time.perf_counter()
    _profile(folder, profiled)
    profile_s = time.perf_counter() - begin_s
    return Rehearsal(
        weights_nbytes(folder), measured, _plan(folder, measured.opening), profile_s, profiled
    )


def _measurement(found: dict) -> FullSizeMeasurement:
    cells = (
        cell | {name: Decoded(**cell[name]) for name in ("cold", "warm")} for cell in found["cells"]
    )
    prompt = Prompted(**found["prompt"])
    return FullSizeMeasurement(
        Opening(**found["opening"]), tuple(Cell(**cell) for cell in cells), prompt
    )


def _profile(folder: Path, tokens: int) -> None:
    """Record a trace of a short text, into a store that is deleted."""
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch) / "text.txt"
        text.write_text(_TEXT * (1 + tokens // len(_TEXT)))
        sizes = f"--tokens {tokens} --length {tokens} --prefill {tokens // 2} --batch 1 --threads 1"
        store = Path(scratch) / "store.duckdb"
        _python(
            *("moectl", "profile", folder, "--trace", "--data", text, "--budget", OF_PROMPT),
            *sizes.split(),
            *("--store", store, "--no-similarity", "--json"),
        )


def _plan(folder: Path, opening: Opening) -> Mapping[str, object]:
    """Return the output of `moectl plan` for a memory that holds a quarter of the experts beside
    all else."""
    room = opening.dense_nbytes + opening.expert_nbytes // 4 + (1 << 30)
    said = _python("moectl", "plan", folder, "--vram", room, "--context", 1, "--json")
    return json.loads(said)


def _python(module: str, *arguments: object) -> str:
    """Return the output of a module of this repository, from its first opening brace on."""
    said = output_of(module, *arguments)
    return said[said.index("{") :]


def _request(options: argparse.Namespace) -> FullSizeRequest:
    return FullSizeRequest(BUDGETS, options.tokens, options.prompt, OF_PROMPT)


def _given(options: argparse.Namespace) -> Sequence[str]:
    models = [f"--model {name}" for name in options.model or ()]
    return [
        *models,
        f"--tokens {options.tokens}",
        f"--prompt {options.prompt}",
        f"--write {options.write}",
    ]


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        tokens=(3, "decoded cold, and warm, at each budget"),
        prompt=(512, "tokens of the prompt"),
        profiled=(16, "tokens of the profile"),
        keep=(Path, "folder where the checkpoints are, or are made, and stay"),
        write=(Path, "page whose sections are written"),
    )
    parser.add_argument(
        "--model", action="append", choices=sorted(CONFIGS), help="only this one; may be repeated"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
