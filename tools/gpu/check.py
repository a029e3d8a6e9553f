"""Checks moectl on a GPU: exactness, hidden copy time and speed beside the plain model, as lines
for readers and as lines of JSON.

    python -m tools.gpu.check --out report.jsonl

It needs torch with CUDA, transformers, numpy, safetensors and rich, and room for 5 GB on disk, in
pinned memory and on the GPU (less with `--layers`). Without a GPU it says so, writes a line whose
`gpu` is null, and ends with exit code 0; with one, the exit code is 1 if a check failed. Each group
of checks runs in a process of its own: after an error of CUDA all that follows in its process
fails.
"""

import argparse
import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path

import torch

from artifacts.quantisation.widths import SCALAR_WIDTHS
from tools import ROOT
from tools.arguments import parser_of
from tools.gpu.checks import formats, kernels, low_bit
from tools.gpu.checks.exactness import exactness, forwards_then_generates
from tools.gpu.checks.replicas import FEW_BITS, few_bits
from tools.gpu.checks.sessions import (
    LARGE,
    SMALL,
    Check,
    Finding,
    attempt,
    bandwidth,
    compared,
    save_random,
    session_speed,
    stock_speed,
)
from tools.gpu.groups import Group, run_groups, tell

Attempts = Iterable[tuple[str, Callable[[], Finding]]]
Checks = Callable[[Path, str, argparse.Namespace], Attempts]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SPEED_RUNS = ("everything resident", "everything resident, fused", "25%", "25%, prefetched")


def main() -> None:
    options = _options()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.group:
        torch.set_num_threads(options.threads)
        with tempfile.TemporaryDirectory() as scratch:
            for check in _attempts(GROUPS[options.group].checks(Path(scratch), device, options)):
                tell(**asdict(check))
        return
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch) / "lines.jsonl"
        out.write_text(
            json.dumps({"gpu": gpu(device), "versions": versions()}) + "\n", encoding="utf-8"
        )
        if gpu(device) is None and not options.device:
            print("no GPU is visible to torch: nothing was checked")
            return
        lines = run_groups(groups(options), out, limit_s=inf)
    passed = [line["passed"] for line in lines if "passed" in line]
    broken = [line["group"] for line in lines if line.get("ended", "well") != "well"]
    print(
        f"{sum(passed)} of {len(passed)} checks passed"
        + "".join(f"; {name} did not end" for name in broken)
    )
    sys.exit(0 if all(passed) and not broken else 1)


def groups(options: argparse.Namespace) -> list[Group]:
    """A process for each group of checks."""
    own = [
        "--layers",
        str(options.layers),
        "--tokens",
        str(options.tokens),
        "--threads",
        str(options.threads),
    ]
    own += ["--device", options.device] if options.device else []
    return [
        Group(name, "tools.gpu.check", ("--group", name, *own), group.limit_s)
        for name, group in GROUPS.items()
        if options.device != "cpu" or not group.needs_gpu
    ]


def _attempts(checks: Attempts) -> Iterator[Check]:
    """Run every check and report each as it ends."""
    return (_tell(attempt(name, check)) for name, check in checks)


def _tell(check: Check) -> Check:
    print(
        f"{'passed' if check.passed else 'FAILED'}  {check.name}: {check.detail}",
        file=sys.stderr,
        flush=True,
    )
    forget()
    return check


def forget() -> None:
    """Free the GPU memory of a check before the next one. Without a GPU skip it: a collection takes
    longer than most checks."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _exactness(dtype: str) -> Checks:
    def checks(scratch: Path, device: str, options: argparse.Namespace) -> Attempts:
        models = {
            "small random": lambda: save_random(scratch / "small", **SMALL),
            "bundled": _bundled,
        }
        for model, folder in models.items():
            for run_name, check in exactness(folder, DTYPES[dtype], device):
                yield f"exact: {model} model, {dtype}, {run_name}", check
        generated = partial(
            forwards_then_generates, save_random(scratch / "small", **SMALL), DTYPES[dtype], device
        )
        yield f"a session forwards, then another thread generates, {dtype}", generated

    return checks


def _kernels(scratch: Path, device: str, options: argparse.Namespace) -> Attempts:
    yield "bandwidth", lambda: bandwidth(device)
    for name, sizes in kernels.SIZES.items():
        yield f"kernels: experts of {name}", partial(kernels.experts, device, sizes)
        yield f"kernels: prompts of {name}", partial(kernels.prompts, device, sizes)
        yield (
            f"kernels: packed experts of {name}",
            partial(_late, "packed", "packed", device, sizes),
        )
    own = {"kind": kernels.GPT_OSS}
    yield (
        "kernels: experts of gpt-oss-20b",
        partial(kernels.experts, device, kernels.GPT_OSS_SIZES, **own),
    )
    yield (
        "kernels: prompts of gpt-oss-20b",
        partial(kernels.prompts, device, kernels.GPT_OSS_SIZES, **own),
    )
    yield (
        "kernels: experts in trellis codes of olmoe-1b-7b",
        partial(_late, "packed", "coded", device, kernels.SIZES["olmoe-1b-7b"]),
    )


def _formats(scratch: Path, device: str, options: argparse.Namespace) -> Attempts:
    for name in formats.CASES:
        yield f"kernels: experts in {name}", partial(_late, "published", "published", device, name)


def _late(module: str, check: str, device: str, case: object) -> Finding:
    """Run a check of a module that imports moectl, which may fail."""
    return getattr(import_module(f"tools.gpu.checks.{module}"), check)(device, case)


def _replicas(scratch: Path, device: str, options: argparse.Namespace) -> Attempts:
    for bits in SCALAR_WIDTHS:
        yield f"replicas: {bits} bits, exact", lambda bits=bits: low_bit.agreement(device, bits)
        yield f"replicas: {bits} bits, speed", lambda bits=bits: low_bit.speed(device, bits)
    for run_name in FEW_BITS:
        check = partial(
            few_bits,
            save_random(scratch / "small", **SMALL),
            scratch / "replicas",
            device,
            run_name,
        )
        yield f"replicas: {run_name}", check


def _speed(scratch: Path, device: str, options: argparse.Namespace) -> Attempts:
    large = scratch / "large"
    measured = {}

    def noted(name: str, check: Callable[[], Finding]) -> Callable[[], Finding]:
        def work() -> Finding:
            measured[name] = Check(name, *(found := check()))
            return found

        return work

    yield "a large random model", lambda: _make(large, device, options.layers)
    yield "speed, stock", noted("stock", lambda: stock_speed(large, device, tokens=options.tokens))
    for name in SPEED_RUNS:
        yield (
            f"speed, {name}",
            noted(name, partial(session_speed, large, device, name, tokens=options.tokens)),
        )
    yield from compared(measured)


@dataclass(frozen=True, slots=True)
class CheckGroup:
    """Checks that share a process."""

    checks: Checks
    limit_s: float
    needs_gpu: bool = False


GROUPS = {
    "exact-float32": CheckGroup(_exactness("float32"), 150.0),
    "exact-bfloat16": CheckGroup(_exactness("bfloat16"), 150.0),
    "kernels": CheckGroup(_kernels, 150.0, needs_gpu=True),
    "formats": CheckGroup(_formats, 150.0, needs_gpu=True),
    "replicas": CheckGroup(_replicas, 150.0),
    "speed": CheckGroup(_speed, 240.0),
}


def _bundled() -> Path:
    return ROOT / "moectl" / "demo"


def _make(folder: Path, device: str, layers: int) -> Finding:
    begin_s = time.perf_counter()
    save_random(folder, device=device, **LARGE | {"num_hidden_layers": layers})
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return (
        True,
        f"{nbytes / 2**30:.1f} GiB in {time.perf_counter() - begin_s:.0f} s",
        {"nbytes": nbytes},
    )


def gpu(device: str) -> dict[str, object] | None:
    if not device.startswith("cuda"):
        return None
    about = torch.cuda.get_device_properties(device)
    return {
        "name": about.name,
        "memory_nbytes": about.total_memory,
        "capability": f"{about.major}.{about.minor}",
        "cuda": torch.version.cuda,
    }


def versions() -> dict[str, str | None]:
    names = ("torch", "transformers", "numpy", "safetensors", "triton")
    return {"python": platform.python_version()} | {name: _version(name) for name in names}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        out=(Path, "write lines of JSON to this file, each as it comes"),
        tokens=(48, "decoded where speed is measured"),
        threads=(4, "of torch on the CPU, where near experts are computed"),
        device=(str, "cuda:1, or cpu to try the checks themselves without a GPU"),
    )
    parser.add_argument(
        "--group", choices=GROUPS, help="run one group, here, and print lines of JSON"
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=LARGE["num_hidden_layers"],
        help="of the large model, 0.8 GB a layer",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
