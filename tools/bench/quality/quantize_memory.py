"""Peak memory of `moectl quantize` on a checkpoint larger than that peak.

    python -m tools.bench.quality.quantize_memory

makes a random checkpoint of 1.5 GiB in a temporary folder, one layer at a time, quantises the
experts of its first layers at all four widths, and prints the peak memory of the calibrating
process and of the largest worker beyond their imports. More layers take longer, not more memory.
Exit code 1 unless both stay below a few times one layer's inputs plus a few copies of one expert.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tools.arguments import parser_of
from tools.bench.measuring import output_of, peak_nbytes, weights_nbytes

if TYPE_CHECKING:
    from profilers.text.batches import Data
    from runtime.model.open import MoeModel

SHAPE = {"layers": 16, "experts": 16, "hidden": 1024, "intermediate": 1024, "top-k": 4}
LENGTH = 256
# copies of a layer's inputs and of an expert in float32 that a process may hold besides the model
INPUTS = 8
EXPERTS = 20


class _Enough(Exception):
    pass


def main() -> None:
    options = _options()
    if options.measure:
        print(json.dumps(measure(options.measure, options)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch) / "checkpoint"
        if not (folder / "config.json").is_file():
            output_of(
                "tools.make.checkpoint",
                folder,
                *(f"--{name}={value}" for name, value in SHAPE.items()),
            )
        asked = [f"--{name}={getattr(options, name)}" for name in ("experts", "jobs", "samples")]
        said = output_of("tools.bench.quality.quantize_memory", "--measure", folder, *asked)
        sys.exit(_show(json.loads(said), weights_nbytes(folder)))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, int]:
    """Quantise some experts; return the peak memory of this process and of its largest worker, and
    sizes beside it."""
    import transformers.models.olmoe.modeling_olmoe  # noqa: F401 - what opening the model would import

    from moectl.commands.build.quantize import QuantizeOptions, calibration_data
    from moectl.shared.opening import open_quietly

    _import_quantisation()
    imports = peak_nbytes()
    opened = open_quietly(str(folder), device="cpu")
    data = calibration_data(opened, QuantizeOptions(samples=options.samples, length=LENGTH))

    worker = _quantise(opened, data, options)
    tokens = sum(map(len, data.sequences))
    return {
        "imports": imports,
        "calibrating": peak_nbytes(),
        "worker": worker,
        "others": sum(
            parameter.nbytes for parameter in opened.model.parameters() if not parameter.is_meta
        ),
        "inputs": tokens * opened.config.hidden_size * opened.store.layout.dtype.itemsize,
        "expert": opened.shape.expert_nbytes,
        "experts": opened.shape.nbytes,
        "tokens": tokens,
    }


def _import_quantisation() -> None:
    """Import all that quantising needs, before memory is measured."""
    import profilers.quantise.replicas
    import profilers.workers.workers  # noqa: F401


def _quantise(opened: "MoeModel", data: "Data", options: argparse.Namespace) -> int:
    """Quantise `options.experts` experts; return the peak memory of the largest worker."""
    from artifacts.store.runs import ModelInfo
    from profilers.quantise.method import Method
    from profilers.quantise.replicas import build_replicas
    from profilers.workers.workers import Processes

    workers = [0]

    def stop(done: int, total: int) -> None:
        print(f"\r{done} experts", end="", file=sys.stderr, flush=True)
        workers.extend(peak_nbytes(child.pid) for child in multiprocessing.active_children())
        if done >= options.experts:
            raise _Enough

    with tempfile.TemporaryDirectory() as scratch:
        model = ModelInfo("random", opened.fingerprint, opened.family, opened.shape)
        store = Path(scratch) / "moe.duckdb"
        try:
            jobs = Processes(options.jobs)
            build_replicas(
                opened, data, Method(), model=model, store_path=store, executor=jobs, progress=stop
            )
        except _Enough:
            print(file=sys.stderr)
    return max(workers)


def _show(found: dict[str, int], total: int) -> int:
    """Print the table; return 1 if a peak exceeds its bound."""
    from moectl.show.render import NumBytes, Sheet, show_sheet

    grown = {name: found[name] - found["imports"] for name in ("calibrating", "worker")}
    rows = [
        ("imports alone", NumBytes(found["imports"]), None),
        ("calibrating", NumBytes(found["calibrating"]), NumBytes(grown["calibrating"])),
        ("largest worker", NumBytes(found["worker"]), NumBytes(grown["worker"])),
        ("of it: the model without its experts", None, NumBytes(found["others"])),
        (f"one layer's inputs, {found['tokens']:,} tokens", None, NumBytes(found["inputs"])),
        ("one expert, as stored", None, NumBytes(found["expert"])),
        ("all experts", None, NumBytes(found["experts"])),
    ]
    note = f"checkpoint: {total:,} bytes on disk; four widths, recipe refined"
    show_sheet(
        Sheet(
            "Peak resident memory while quantising",
            ("process or part", "peak", "beyond imports"),
            rows,
            note,
        )
    )
    allowed = found["others"] + INPUTS * found["inputs"] + EXPERTS * 2 * found["expert"]
    return int(max(grown.values()) > allowed or sum(grown.values()) >= found["experts"])


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        folder=(Path, "a checkpoint; it is made there, and kept, if it is missing"),
        experts=(20, "how many to quantise"),
        samples=(64, f"sequences of {LENGTH} tokens to calibrate on"),
        jobs=2,
    )
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
