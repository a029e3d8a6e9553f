"""`moectl generate` through kills and a full disk: every prompt is answered once, in its place.

    python -m tools.bench.serving.generate_soak                           1,000 prompts, 3 kills and a full disk
    python -m tools.bench.serving.generate_soak --prompts 200 --tokens 64

Each command is a process of its own. A kill is SIGKILL after some more rows were written; the full
disk is a limit on the size of files, within a line. Exits 1 where an answer is lost or doubled. The
answers are compared with an undisturbed run's. In bfloat16 some differ, since other requests share
a pass after a stop.
"""

import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moectl.bundled import demo_model
from moectl.cli import main as moectl
from moectl.commands.start import generate  # noqa: F401  imported once: the processes are forks of this one
from tools.arguments import parser_of
from tools.bench.serving.servers import long_texts

KILL = "kill"
FULL_DISK = "full disk"
_FULL = 4
_DONE = 0
_PARTLY = 6
_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class SoakResult:
    """Result of a soak.

    It counts the rows that were asked for, the rows that occur once and in their place, and the
    answers among them that equal the undisturbed run's. It also counts how often a command was
    killed or found the disk full, and has the rows there after each stop.
    """

    num_rows: int
    num_placed: int
    num_equal: int
    num_kills: int
    num_full: int
    rows_after: tuple[int, ...]


def soak(
    folder: Path,
    *,
    model: str,
    num_prompts: int,
    stops: Sequence[str],
    tokens: int,
    batch: int,
    seed: int,
    draft: str = "none",
) -> SoakResult:
    """Answer prompts undisturbed and undrafted, and again with a stop after each part of them."""
    rng = random.Random(seed)
    data = folder / "soak.jsonl"
    whole = folder / "whole.jsonl"
    out = folder / "stopped.jsonl"
    _write_prompts(data, num_prompts, rng)
    own = f"--max-new-tokens {tokens} --batch {batch} --threads 1 --greedy --json".split()
    command = ["generate", model, "--data", str(data), *own, "--out"]
    assert _ended([*command, str(whole)]) in (_DONE, _PARTLY)
    sizes = [len(line) for line in whole.read_bytes().splitlines(keepends=True)]
    command[1:1] = ["--draft", draft]
    told = []
    rows_after = []
    for number, stop in enumerate(stops, start=1):
        num_rows = num_prompts * number // (len(stops) + 1) + rng.randrange(3)
        told.append(
            _stopped(
                [*command, str(out)], stop, out, nbytes=sum(sizes[:num_rows]) + rng.randrange(1, 20)
            )
        )
        rows_after.append(out.read_bytes().count(b"\n"))
    assert _ended([*command, str(out)]) in (_DONE, _PARTLY)
    lines, expected = (
        [json.loads(line) for line in path.read_bytes().splitlines()] for path in (out, whole)
    )
    pairs = list(zip(lines, expected, strict=False))
    num_placed = sum(_named(mine) == _named(theirs) for mine, theirs in pairs) - abs(
        len(lines) - len(expected)
    )
    num_equal = sum(mine == theirs for mine, theirs in pairs)
    stopped = told.count(KILL), told.count(FULL_DISK)
    return SoakResult(num_prompts, num_placed, num_equal, *stopped, tuple(rows_after))


def _named(line: dict) -> tuple:
    return line["row"], line.get("id"), "error" in line


def _write_prompts(path: Path, num_prompts: int, rng: random.Random) -> None:
    texts = long_texts()
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_prompts):
            text = rng.choice(texts)
            begin = rng.randrange(100)
            row = {"id": number, "prompt": text[begin : begin + rng.randrange(10, 90)]}
            print(json.dumps(row) if rng.random() > 0.02 else "", file=file)


def _ended(command: list[str], *, most_nbytes: int | None = None) -> int:
    process = _begun(command, most_nbytes=most_nbytes)
    process.join()
    return process.exitcode


def _begun(command: list[str], *, most_nbytes: int | None = None) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(
        target=_child, args=(command, most_nbytes)
    )
    process.start()
    return process


def _child(command: list[str], most_nbytes: int | None) -> None:
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    if most_nbytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_nbytes, resource.RLIM_INFINITY))
    os._exit(moectl(command))


def _stopped(command: list[str], stop: str, out: Path, *, nbytes: int) -> str | None:
    """Run the command until the file of answers has `nbytes` bytes, and stop it there. Returns how
    it ended, None if it ended otherwise."""
    if stop == FULL_DISK:
        return FULL_DISK if _ended(command, most_nbytes=nbytes) == _FULL else None
    process = _begun(command)
    while process.is_alive() and (not out.exists() or out.stat().st_size < nbytes):
        time.sleep(_POLL_S)
    process.kill()
    process.join()
    return KILL if process.exitcode == -9 else None


def main() -> int:
    options = parser_of(
        __doc__, prompts=1000, tokens=32, batch=64, seed=0, draft="none"
    ).parse_args()
    stops = [KILL, FULL_DISK, KILL, KILL]
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(
            Path(folder),
            model=str(demo_model()),
            num_prompts=options.prompts,
            stops=stops,
            tokens=options.tokens,
            batch=options.batch,
            seed=options.seed,
            draft=options.draft,
        )
    print(f"{result} in {time.perf_counter() - begin_s:.0f} s")
    is_sound = result.num_placed == result.num_rows and result.num_kills + result.num_full == len(
        stops
    )
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
