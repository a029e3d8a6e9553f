"""Peak memory of `moectl quantize` on a checkpoint that is larger than it ever holds.

    python -m tools.bench.quantize_memory

makes a random checkpoint of 1.5 GiB in a temporary folder, one layer at a time, quantises the experts of its first
layers at all four widths, and says what the process that calibrates and the largest worker have ever held, beyond what
their imports take. Layers are alike: more of them take longer and no more memory. It ends with exit code 1 unless both
stay below a few times one layer's inputs plus a few copies of one expert.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SHAPE = {"layers": 16, "experts": 16, "hidden": 1024, "intermediate": 1024, "top-k": 4}
LENGTH = 256
INPUTS, EXPERTS = 8, 20  # of a layer's inputs and of one expert in float32: what a process may hold besides the model


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
            shape = [word for name, value in SHAPE.items() for word in (f"--{name}", str(value))]
            subprocess.run([sys.executable, "-m", "tools.make.checkpoint", str(folder), *shape], check=True)
        command = [sys.executable, "-m", "tools.bench.quantize_memory", "--measure", str(folder)]
        command += ["--experts", str(options.experts), "--jobs", str(options.jobs)]
        command += ["--samples", str(options.samples)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        sys.exit(_show(json.loads(done.stdout), sum(path.stat().st_size for path in folder.glob("*.safetensors"))))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, int]:
    """Quantise, and say what this process and its largest worker have ever held."""
    import transformers.models.olmoe.modeling_olmoe  # noqa: F401 - what opening the model would import

    from artifacts.store.runs import ModelInfo
    from moectl.commands.quantize import QuantizeRequest, calibration_data
    from moectl.shared.opening import open_quietly
    from profilers.quantise.method import Method
    from profilers.quantise.replicas import build_replicas
    from profilers.workers.workers import Processes

    imports = _peak(os.getpid())
    workers = [0]
    opened = open_quietly(str(folder), device="cpu")
    data = calibration_data(opened, QuantizeRequest(samples=options.samples, length=LENGTH))

    def stop(done: int, total: int) -> None:
        print(f"\r{done} experts", end="", file=sys.stderr, flush=True)
        workers.extend(_peak(child.pid) for child in multiprocessing.active_children())
        if done >= options.experts:
            raise _Enough

    with tempfile.TemporaryDirectory() as scratch:
        model = ModelInfo("random", opened.fingerprint, opened.family, opened.shape)
        store = Path(scratch) / "moe.duckdb"
        try:
            jobs = Processes(options.jobs)
            build_replicas(opened, data, Method(), model=model, store_path=store, executor=jobs, progress=stop)
        except _Enough:
            print(file=sys.stderr)
    tokens = sum(map(len, data.sequences))
    return {
        "imports": imports,
        "calibrating": _peak(os.getpid()),
        "worker": max(workers),
        "others": sum(parameter.nbytes for parameter in opened.model.parameters() if not parameter.is_meta),
        "inputs": tokens * opened.config.hidden_size * opened.store.layout.dtype.itemsize,
        "expert": opened.shape.expert_nbytes,
        "experts": opened.shape.nbytes,
        "tokens": tokens,
    }


def _peak(process: int) -> int:
    """Bytes that a process has ever had resident. Its `ru_maxrss` would begin with what its parent had."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status).group(1)) * 1024


def _show(found: dict[str, int], total: int) -> int:
    """Print the table; 1 if more was held than may be."""
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
        Sheet("Peak resident memory while quantising", ("process or part", "peak", "beyond imports"), rows, note)
    )
    allowed = found["others"] + INPUTS * found["inputs"] + EXPERTS * 2 * found["expert"]
    return int(max(grown.values()) > allowed or sum(grown.values()) >= found["experts"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a checkpoint; it is made there, and kept, if it is missing")
    parser.add_argument("--experts", type=int, default=20, help="how many to quantise")
    parser.add_argument("--samples", type=int, default=64, help=f"sequences of {LENGTH} tokens to calibrate on")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
