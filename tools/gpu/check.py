"""Checks moectl on a GPU: exactness, hidden copy time and speed beside the plain model, as a table and a JSON report.

    python -m tools.gpu.check --out report.json

It needs torch with CUDA, transformers, numpy, safetensors and rich, and room for 5 GB on disk, in pinned memory and on
the GPU (less with `--layers`). Without a GPU it says so, writes a report whose `gpu` is null, and ends with exit code
0; with one, the exit code is 1 if a check failed. A check that cannot run fails by itself, the others go on.
"""

import argparse
import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from artifacts.quantisation.widths import SCALAR_WIDTHS
from tools import ROOT
from tools.gpu.checks import formats, kernels, low_bit
from tools.gpu.checks.replicas import FEW_BITS, few_bits
from tools.gpu.checks.sessions import (
    LARGE,
    SMALL,
    Check,
    Finding,
    attempt,
    bandwidth,
    compared,
    exactness,
    save_random,
    session_speed,
    stock_speed,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SPEED_RUNS = ("everything resident", "everything resident, fused", "25%", "25%, prefetched")


def main() -> None:
    options = _options()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    report = {"gpu": gpu(device), "versions": versions(), "checks": []}
    if report["gpu"] is None and not options.device:
        print("no GPU is visible to torch: nothing was checked")
    else:
        begin_s = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            checks = run(Path(scratch), device, options)
        report |= {"checks": [asdict(check) for check in checks], "seconds": time.perf_counter() - begin_s}
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    failed = sum(not check["passed"] for check in report["checks"])
    if report["checks"]:
        print(f"{len(report['checks']) - failed} of {len(report['checks'])} checks passed")
    sys.exit(1 if failed else 0)


def run(scratch: Path, device: str, options: argparse.Namespace) -> list[Check]:
    """Run every check and report each as it ends."""
    torch.set_num_threads(options.threads)
    checks = list(_attempts(_exactness(scratch, device)))
    if device != "cpu":
        checks += _attempts([("bandwidth", lambda: bandwidth(device)), *_kernels(device)])
    checks += _attempts(_lowbit(device))
    checks += _attempts(_few_bits(scratch, device))
    large = scratch / "large"
    made = attempt("a large random model", lambda: _make(large, device, options.layers))
    if not made.passed:
        return [*checks, _tell(made)]
    speed = {"stock": lambda: stock_speed(large, device, tokens=options.tokens)}
    for name in SPEED_RUNS:
        speed[name] = lambda name=name: session_speed(large, device, name, tokens=options.tokens)
    measured = dict(zip(speed, _attempts((f"speed, {name}", check) for name, check in speed.items()), strict=True))
    return [*checks, *measured.values(), *_attempts(compared(measured))]


def _attempts(checks: Iterable[tuple[str, Callable[[], Finding]]]) -> list[Check]:
    return [_tell(attempt(name, check)) for name, check in checks]


def _tell(check: Check) -> Check:
    print(f"{'passed' if check.passed else 'FAILED'}  {check.name}: {check.detail}", flush=True)
    forget()
    return check


def forget() -> None:
    """Free the GPU memory of a check before the next one. Without a GPU skip it: a collection takes longer than most
    checks."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _exactness(scratch: Path, device: str) -> Iterable[tuple[str, Callable[[], Finding]]]:
    models = {"small random": lambda: save_random(scratch / "small", **SMALL), "bundled": _bundled}
    for model, folder in models.items():
        for dtype_name, dtype in DTYPES.items():
            for run_name, check in exactness(folder, dtype, device):
                yield f"exact: {model} model, {dtype_name}, {run_name}", check


def _kernels(device: str) -> Iterable[tuple[str, Callable[[], Finding]]]:
    for name, sizes in kernels.SIZES.items():
        yield f"kernels: experts of {name}", partial(kernels.experts, device, sizes)
        yield f"kernels: prompts of {name}", partial(kernels.prompts, device, sizes)
        yield f"kernels: packed experts of {name}", partial(_packed, device, sizes)
    for name in formats.CASES:
        yield f"kernels: experts in {name}", partial(_published, device, name)


def _packed(device: str, sizes: tuple[int, int, int, int]) -> Finding:
    from tools.gpu.checks import packed as gpu_packed  # which imports moectl

    return gpu_packed.packed(device, sizes)


def _published(device: str, name: str) -> Finding:
    from tools.gpu.checks import published as gpu_published  # which imports moectl

    return gpu_published.published(device, name)


def _lowbit(device: str) -> Iterable[tuple[str, Callable[[], Finding]]]:
    for bits in SCALAR_WIDTHS:
        yield f"replicas: {bits} bits, exact", lambda bits=bits: low_bit.agreement(device, bits)
        yield f"replicas: {bits} bits, speed", lambda bits=bits: low_bit.speed(device, bits)


def _few_bits(scratch: Path, device: str) -> Iterable[tuple[str, Callable[[], Finding]]]:
    for run_name in FEW_BITS:
        check = partial(few_bits, save_random(scratch / "small", **SMALL), scratch / "replicas", device, run_name)
        yield f"replicas: {run_name}", check


def _bundled() -> Path:
    return ROOT / "moectl" / "demo"


def _make(folder: Path, device: str, layers: int) -> Finding:
    begin_s = time.perf_counter()
    save_random(folder, device=device, **LARGE | {"num_hidden_layers": layers})
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return True, f"{nbytes / 2**30:.1f} GiB in {time.perf_counter() - begin_s:.0f} s", {"nbytes": nbytes}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the JSON report to this file")
    parser.add_argument(
        "--layers", type=int, default=LARGE["num_hidden_layers"], help="of the large model, 0.8 GB a layer"
    )
    parser.add_argument("--tokens", type=int, default=48, help="decoded where speed is measured")
    parser.add_argument("--threads", type=int, default=4, help="of torch on the CPU, where near experts are computed")
    parser.add_argument("--device", help="cuda:1, or cpu to try the checks themselves without a GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
