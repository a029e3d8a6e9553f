"""Measure how right `moectl advise` is about llama.cpp on this CPU: models of random weights, each
predicted from its header and decoded by the package xllamacpp.

    python -m tools.bench.decoding.advice FOLDER               every model, with 1 and 2 threads
    python -m tools.bench.decoding.advice FOLDER --fit         constants of the prediction, afresh
    python -m tools.bench.decoding.advice FOLDER --own         moectl's bundled model, at each budget

Files are made in FOLDER where it lacks them, 11 GB. One thread counts in processor time; with two,
whose waiting spins, nothing else may run: a row whose spread is above 10 % says nothing. Constants
are fitted on other models than those that predictions are tested on.
"""

from pathlib import Path
from statistics import median

import numpy as np
import torch
from scipy.optimize import nnls

from moectl.bundled import demo_model
from moectl.commands.build.profile import hardware
from moectl.commands.start.advise.llama_cpu import CpuWork, tokens_per_second
from moectl.commands.start.advise.verifying import run_llama_cpp
from moectl.commands.start.doctor.measured import sequences_of
from moectl.shared.opening import open_quietly
from profilers.compare.check_prediction import check
from profilers.hardware.load_times import QUICK
from tools.arguments import parser_of
from tools.make.gguf_models import FITTED_ON, MODELS, TYPES, make

BUDGETS = ("10%", "25%", "50%", "100%")


def work_of(folder: Path, name: str) -> tuple[Path, CpuWork]:
    """Return a model's file, made if it is missing, and its work."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        make((MODELS | FITTED_ON)[name], path)
    return path, CpuWork.of(path)


def fit(folder: Path) -> None:
    """Print the constants that predict one thread's times of `FITTED_ON` with the least squares of
    relative errors."""
    rows = []
    for name in FITTED_ON:
        path, work = work_of(folder, name)
        second = 1 / max(run_llama_cpp(path, 1).rates)
        print(f"{name}: {second * 1e3:.2f} ms", flush=True)
        weights = [work.weights.get(kind, 0.0) for kind in TYPES]
        rows.append(np.array([*weights, work.layers, work.words]) / second)
    solved, _ = nnls(np.array(rows), np.ones(len(rows)))
    told = ", ".join(
        f'"{kind}": {1e9 * each:.4f}' for kind, each in zip(TYPES, solved[:-2], strict=True)
    )
    print(f"NS_PER_WEIGHT {{{told}}}; LAYER_S {solved[-2]:.3g}; WORD_S {solved[-1]:.3g}")


def test(folder: Path, threads: list[int]) -> None:
    """Print a row of a table for each model and number of threads, and the median error."""
    errors = []
    print("| model | threads | predicted | measured | spread | error |\n|---|---|---|---|---|---|")
    for name in MODELS:
        path, work = work_of(folder, name)
        for count in threads:
            measured = run_llama_cpp(path, count)
            rate = median(measured.rates)
            predicted = tokens_per_second(work, count)
            errors.append(predicted / rate - 1)
            told = f"{predicted:.1f} | {rate:.1f} | {measured.spread:.0%} | {errors[-1]:+.1%}"
            print(f"| {name} | {count} | {told} |", flush=True)
    print(f"median of the errors' sizes: {median(map(abs, errors)):.1%} of {len(errors)}")


def own() -> None:
    """Print a row for each budget of the bundled model, on one thread: what a short profile
    predicts, at the pace of the machine while the run was measured."""
    opened = open_quietly(str(demo_model()), device="cpu")
    torch.set_num_threads(1)
    profile = hardware.measured(str(demo_model()), opened, link="disk", replicas=None, effort=QUICK)
    print("| budget | predicted | measured | pace | error |\n|---|---|---|---|---|")
    for budget in BUDGETS:
        found = check(opened, profile, sequences_of(opened), prefill=16, budget=budget, link="disk")
        rates = [1e3 / found.measured_ms / found.ratio_at_pace, 1e3 / found.measured_ms]
        told = (
            f"{rates[0]:.1f} | {rates[1]:.1f} | {found.pace:.2f} | {rates[0] / rates[1] - 1:+.1%}"
        )
        print(f"| {budget} | {told} |", flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="folder of the files")
    parser.add_argument("--fit", action="store_true", help="measure constants instead")
    parser.add_argument("--own", action="store_true", help="predict moectl's own run instead")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.own:
        own()
    elif options.fit:
        fit(options.folder)
    else:
        test(options.folder, options.threads)


if __name__ == "__main__":
    main()
