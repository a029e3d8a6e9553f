"""Peak memory of a checkpoint run whole and run offloaded, each in a process of its own.

    python -m tools.bench.disk.peak_memory

makes a random checkpoint of 2 GiB in a temporary folder, one layer at a time, and generates the
same number of tokens with plain transformers and with moectl over the disk link, at a quarter of
the experts and at one expert a layer. It ends with exit code 1 unless the offloaded processes stay
so small that they cannot have held all experts.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.arguments import parser_of
from tools.bench.measuring import drop, last_line, output_of, peak_nbytes, weights_nbytes

PROMPT = "Offloading moves experts, not tokens."
# a run of the whole model; any other value is the budget of a session
NOTHING = "nothing"
PLAIN = "plain"
SHAPE = {"layers": 10, "experts": 64, "hidden": 1024, "intermediate": 512}
NAMES = {NOTHING: "imports alone", PLAIN: "transformers, from_pretrained"}


@dataclass(frozen=True, slots=True)
class Row:
    """One process. `expert_nbytes`: of routed experts in the fast tier; `ms_per_token` of those
    after the first."""

    name: str
    peak_nbytes: int
    expert_nbytes: int
    load_s: float
    ms_per_token: float


def main() -> None:
    options = _options()
    if options.measure:
        print(json.dumps(asdict(measure(options.measure, options.folder, tokens=options.tokens))))
        return
    with _checkpoint(options) as folder:
        smallest = f"{json.loads((folder / 'config.json').read_text())['num_hidden_layers']}x"
        rows = [_in_process(name, folder, options) for name in (NOTHING, PLAIN, "25%", smallest)]
        total = weights_nbytes(folder)
    _show(rows, total, options)
    if options.json:
        record = {"checkpoint_nbytes": total, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(_verdict(rows))


# In a process of its own


def measure(name: str, folder: Path, *, tokens: int) -> Row:
    """Load and generate; return the peak resident memory of this process."""
    import torch

    from runtime.session.generation.sampling import Sampling
    from runtime.session.session import Session, Settings

    sampling = Sampling(tokens, ignore_eos=True)
    torch.set_num_threads(1)
    begin_s = time.perf_counter()
    expert_nbytes = 0
    seconds = []
    if name == PLAIN:
        model, tokenizer = _plain(folder)
        loaded_s = time.perf_counter()
        expert_nbytes = sum(p.nbytes for key, p in model.named_parameters() if ".experts." in key)
        seconds = _plain_seconds(model, tokenizer, sampling.options())
    elif name != NOTHING:
        with Session.open(str(folder), Settings(budget=name, link="disk", device="cpu")) as session:
            loaded_s = time.perf_counter()
            generated = session.tokens(session.encode(PROMPT), sampling)
            seconds = [token.seconds for token in generated]
            expert_nbytes = session.parts.slots.nbytes
    else:
        loaded_s = begin_s
    peak = peak_nbytes()
    per_token = (seconds[-1] - seconds[0]) / (len(seconds) - 1) if seconds else 0.0
    return Row(name, peak, expert_nbytes, loaded_s - begin_s, per_token * 1e3)


def _plain(folder: Path) -> tuple:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(
        folder
    )


def _plain_seconds(model, tokenizer, options: dict[str, object]) -> list[float]:
    """Seconds from the prompt to each token of plain generate()."""
    from transformers.generation.streamers import BaseStreamer

    class Times(BaseStreamer):
        def __init__(self) -> None:
            self.at_s: list[float] = []

        def put(self, value: object) -> None:
            self.at_s.append(time.perf_counter())

        def end(self) -> None: ...

    times = Times()
    given = tokenizer(PROMPT, return_tensors="pt")
    model.generate(**given, streamer=times, **options)
    begin_s, *after_s = times.at_s  # the prompt comes first
    return [at_s - begin_s for at_s in after_s]


# In the process that compares


@contextmanager
def _checkpoint(options: argparse.Namespace) -> Iterator[Path]:
    """The given folder, filled if it is empty, or a temporary one."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch) / "checkpoint"
        if not (folder / "config.json").is_file():
            shape = [f"--{name}={getattr(options, name)}" for name in ("layout", *SHAPE)]
            output_of("tools.make.checkpoint", folder, *shape)
        yield folder


def _in_process(name: str, folder: Path, options: argparse.Namespace) -> Row:
    if options.cold:
        os.sync()
        drop(folder)
    asked = ("--measure", name, "--folder", folder, "--tokens", options.tokens)
    return Row(**json.loads(last_line(output_of("tools.bench.disk.peak_memory", *asked))))


def _show(rows: list[Row], total: int, options: argparse.Namespace) -> None:
    from moectl.show.render import NumBytes, Sheet, show_sheet

    columns = (
        "process",
        "peak resident",
        "of it beyond imports",
        "experts in the fast tier",
        "load, s",
        "ms/token",
    )
    base = rows[0].peak_nbytes
    cells = [
        (
            NAMES.get(row.name, f"moectl, disk link, budget {row.name}"),
            NumBytes(row.peak_nbytes),
            NumBytes(row.peak_nbytes - base),
            NumBytes(row.expert_nbytes),
            f"{row.load_s:.1f}",
            f"{row.ms_per_token:.0f}",
        )
        for row in rows
    ]
    files = "not in the page cache at the start" if options.cold else "in the page cache"
    note = (
        f"checkpoint: {total:,} bytes on disk, {files}; {options.tokens} tokens after a short "
        "prompt; one thread"
    )
    show_sheet(Sheet("Peak resident memory, each in a process of its own", columns, cells, note))


def _verdict(rows: list[Row]) -> int:
    """1 if a session grew by at least the bytes of all experts, else 0."""
    base, plain, *sessions = rows
    return int(any(row.peak_nbytes - base.peak_nbytes >= plain.expert_nbytes for row in sessions))


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        folder=(Path, "a checkpoint; it is made there, and kept, if it is missing"),
        tokens=32,
        cold=(False, "drop the files from the page cache before every process"),
        json=(Path, "write the figures to this file as well"),
    )
    parser.add_argument(
        "--layout", choices=("hub", "fused"), default="hub", help="of the checkpoint that is made"
    )
    for name, default in SHAPE.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, help="of the checkpoint that is made"
        )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
