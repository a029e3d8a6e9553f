"""`moectl advise --verify`: the speed that was predicted, beside what the engine gives."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from artifacts.common.host_memory import num_cores
from artifacts.errors import BadInput, BadUsage, first_line
from artifacts.hardware.machines import Machine
from artifacts.store.runs import RunInfo, utc_now
from artifacts.store.store import Store, add_run
from artifacts.store.verifications import (
    ENOUGH,
    TABLE,
    Verification,
    interval,
    median_error,
    to_rows,
    verifications_of,
)
from moectl.bundled import as_named, demo_model
from moectl.cli.options import EngineOptions
from moectl.commands.start.advise.answer import rounded
from moectl.commands.start.advise.choosing import Advice, advise_on
from moectl.commands.start.advise.engines import AdvisedEngine
from moectl.commands.start.advise.llama_cpu import SPREAD, CpuWork, tokens_per_second
from moectl.commands.start.plan.fitting import PlanRequest
from moectl.shared.terminal.progress import Phases
from profilers.hardware.this_machine import LocalMachine
from runtime.model.gguf.config import read_headers

if TYPE_CHECKING:
    from moectl.commands.start.doctor.measured import Diagnosis

LLAMA_CPP = "llama.cpp"
MOECTL = "moectl"
RUNS = 5
TOKENS = 16
OWN_SPREAD = 0.1
"""How far off a prediction of moectl may be until there are verifications."""
QUIET = 0.1
"""Spread of runs above which something else used the machine."""

_EVALUATED = re.compile(r"(?<!prompt )eval time = +[\d.]+ ms / +\d+ (?:tokens|runs).*?([\d.]+) tok")


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens a second of each run of an engine, with its version, threads and the clock. `uses_gpu`
    is None where the source does not tell."""

    rates: tuple[float, ...]
    version: str
    threads: int
    clock: str = ""
    uses_gpu: bool | None = None

    @property
    def spread(self) -> float:
        return (max(self.rates) - min(self.rates)) / median(self.rates)


def verified(
    request: PlanRequest,
    engine: AdvisedEngine,
    *,
    trace: str | None,
    threads: int | None,
    log: Path | None,
    store: Path,
) -> str:
    """Compare what an engine gives with what is predicted, keep both in the store, and return the
    line that tells them: llama.cpp or moectl run here on the CPU, or a log, which is compared with
    the advice for the request unless llama.cpp used no GPU. Raises BadUsage or BadInput."""
    if log is None and engine.name == MOECTL:
        return verify_moectl(request.model, threads=threads, store=store)
    started_at = utc_now()
    begin_s = perf_counter()
    path = Path(request.model)
    found = _measured(path, engine, threads or num_cores(), log)
    expected = _expected(request, engine, found, trace)
    verification = _verification(path, engine, found, expected)
    earlier = kept(store, verification, started_at, perf_counter() - begin_s)
    return line(verification, earlier, (expected.low, expected.high), clock=found.clock)


def _measured(path: Path, engine: AdvisedEngine, threads: int, log: Path | None) -> Measured:
    """Return the rates in the log, else of llama.cpp on this CPU."""
    if log is None and engine.name != LLAMA_CPP:
        raise BadUsage(f"moectl runs no {engine.name}: give its log, as --engine-log FILE")
    if log is None or path.suffix == ".gguf":
        _check_file(path)
    return from_log(log, threads) if log else run_llama_cpp(path, threads)


def _verification(
    path: Path, engine: AdvisedEngine, found: Measured, expected: "_Expected"
) -> Verification:
    return Verification(
        model=path.name,
        digest=read_headers(path)[0].digest.hex() if path.is_file() else "",
        engine=engine.name,
        version=found.version,
        machine=expected.machine,
        setting=expected.setting,
        predicted=expected.rate,
        measured=median(found.rates),
        spread=found.spread,
        runs=len(found.rates),
    )


class _Expected(NamedTuple):
    """The expected tokens a second, their interval, the machine and the setting."""

    rate: float
    low: float
    high: float
    machine: str
    setting: str


def _expected(
    request: PlanRequest, engine: AdvisedEngine, found: Measured, trace: str | None
) -> _Expected:
    has_gpu = request.place.machine is not None
    if has_gpu if found.uses_gpu is None else found.uses_gpu:
        return _advised(request, engine, trace)
    return _on_cpu(Path(request.model), found.threads, request.place.machine)


def _advised(request: PlanRequest, engine: AdvisedEngine, trace: str | None) -> _Expected:
    found = advise_on(request, engine, trace).prediction
    place = request.place.shown
    return _Expected(found.tokens_per_second, found.low, found.high, place, "as advised")


def _on_cpu(path: Path, threads: int, machine: Machine | None) -> _Expected:
    _check_file(path)
    rate = tokens_per_second(CpuWork.of(path), threads, machine and machine.near_gbps)
    between = (rate / (1 + SPREAD), rate * (1 + SPREAD))
    return _Expected(rate, *between, here(threads), f"CPU, {threads} threads")


def _check_file(path: Path) -> None:
    if not path.is_file() or path.suffix != ".gguf":
        raise BadUsage(f"{path} is no GGUF file: llama.cpp's CPU is verified on one, name its path")


def verify_moectl(model: str, *, threads: int | None, store: Path) -> str:
    """Measure this machine's costs with the model, predict a short run from its trace, and run it.

    Predicted at the pace of the run: other work on the machine slows both. Raises as
    `doctor.measured.diagnose` does.
    """
    from moectl.commands.start.doctor.measured import diagnose

    started_at = utc_now()
    begin_s = perf_counter()
    name = as_named(model) or str(demo_model())
    options = EngineOptions() if threads is None else EngineOptions(threads=threads)
    with Phases(8, 1, 4) as phases:
        diagnosis = diagnose(name, options, phases, named=None, store=store)
    verification = _of_diagnosis(name, diagnosis, options)
    earlier = kept(store, verification, started_at, perf_counter() - begin_s)
    rate = verification.predicted
    expected = [rate / (1 + OWN_SPREAD), rate * (1 + OWN_SPREAD)]
    return line(verification, earlier, expected, clock=f", pace {diagnosis.prediction.pace:.2f}")


def _of_diagnosis(name: str, diagnosis: "Diagnosis", options: EngineOptions) -> Verification:
    from moectl.shared.opening import open_quietly

    found = diagnosis.prediction
    machine = diagnosis.measured.profile.conditions
    return Verification(
        model=Path(name).name,
        digest=open_quietly(name, device=options.device).fingerprint,
        engine=MOECTL,
        version=metadata.version(MOECTL),
        machine=f"{machine['device_name']}, {machine['cores']} cores",
        setting=f"budget {found.budget}, {options.threads} threads",
        predicted=1e3 / (found.measured_ms * found.ratio_at_pace),
        measured=1e3 / found.measured_ms,
        spread=0.0,
        runs=found.tokens,
    )


def here(threads: int) -> str:
    """Return the name of this machine: its processor and cores."""
    local = LocalMachine.glance("cpu", threads)
    return f"{local.processor}, {local.cores} cores"


def kept(
    store: Path, verification: Verification, started_at: datetime, seconds: float
) -> list[Verification]:
    """Write a verification; return those of that engine and machine before it."""
    earlier = []
    if store.exists():
        with Store.open(store, read_only=True) as opened:
            earlier = verifications_of(opened, verification.engine, verification.machine)
    info = RunInfo("advise", None, started_at, seconds)
    add_run(store, info, {TABLE: to_rows([verification])})
    return earlier


def as_verified(advice: Advice, store: Path) -> Advice:
    """Return the advice with the interval that the store's verifications of this engine on this
    machine give, if there are enough."""
    prediction = advice.prediction
    with Store.open(store, read_only=True) as opened:
        found = verifications_of(opened, advice.engine.name, advice.request.place.shown)
    between = interval(found, prediction.tokens_per_second)
    if between is None:
        return advice
    ground = f"interval: from {len(found)} verifications, median error {median_error(found):.1%}"
    low, high = between
    grounds = (*prediction.grounds, ground)
    return replace(advice, prediction=replace(prediction, low=low, high=high, grounds=grounds))


def line(
    verification: Verification,
    earlier: Sequence[Verification],
    expected: Sequence[float],
    *,
    clock: str = "",
) -> str:
    """Return what was predicted and measured, and by how much they differ; `expected` are the least
    and the most until enough verifications tell them."""
    predicted = verification.predicted
    low, high = interval(earlier, predicted) or expected
    rest = (
        f"from {len(earlier)} verifications"
        if len(earlier) >= ENOUGH
        else f"assumed until {ENOUGH} verifications, this is {len(earlier) + 1}"
    )
    busy = "; other work used the machine, run it again" * (verification.spread > QUIET)
    return (
        f"verified: predicted {rounded(predicted)} tokens/s ({rounded(low)} to {rounded(high)}, "
        f"{rest}), {verification.engine} {verification.version} gave "
        f"{rounded(verification.measured)} ({verification.setting}{clock}; median of "
        f"{verification.runs}, spread {verification.spread:.0%}{busy}): error "
        f"{verification.error:+.1%}"
    )


def run_llama_cpp(path: Path, threads: int) -> Measured:
    """Run llama-bench, or the package xllamacpp where there is none. Raises BadInput."""
    if program := shutil.which("llama-bench"):
        return _run_llama_bench(program, path, threads)
    from profilers.compare.llama_cpp import PACKAGE, LlamaCpp, check_installed

    check_installed()
    llama = LlamaCpp(path, threads=threads, num_tokens=TOKENS + 8, vocab_size=0)
    # waiting threads spin, so that only the time of a single one is all work
    which = threads == 1
    runs = [llama.token_seconds(TOKENS, seed=seed)[which] for seed in range(RUNS + 1)][1:]
    version = f"b{metadata.version(PACKAGE).rpartition('.')[2]}"
    rates = tuple(1 / each for each in runs)
    return Measured(rates, version, threads, ", processor time" * which, uses_gpu=False)


def _run_llama_bench(program: str, path: Path, threads: int) -> Measured:
    asked = ["-m", path, "-t", threads, "-ngl", 0, "-p", 0, "-n", TOKENS, "-r", RUNS]
    done = subprocess.run(
        [program, *map(str, asked), "-o", "json"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BadInput(f"llama-bench failed: {first_line(RuntimeError(done.stderr))}")
    return _of_bench(json.loads(done.stdout))


def from_log(path: Path, threads: int) -> Measured:
    """Read the tokens a second of decoding from what `llama-bench -o json` printed, from an answer
    of llama-server in JSON, or from its log; `threads` count where the file does not say how many.
    Raises BadInput."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {first_line(error)}") from error
    try:
        read = json.loads(text)
    except ValueError:
        read = None
    if isinstance(read, list):
        return _of_bench(read)
    rates = [read.get("timings", {}).get("predicted_per_second")] if isinstance(read, dict) else []
    rates = [float(each) for each in rates or _EVALUATED.findall(text) if each]
    if not rates:
        raise BadInput(
            f"{path} has no time of decoding: give what `llama-bench -o json` prints, or "
            "llama-server's log"
        )
    return Measured(tuple(rates), "of the log", threads)


def _of_bench(tests: list) -> Measured:
    """Return the last test that only decodes. Raises BadInput."""
    try:
        decoded = [test for test in tests if test["n_prompt"] == 0 and test["n_gen"] > 0]
        if decoded:
            test = decoded[-1]
            return Measured(
                tuple(map(float, test["samples_ts"])),
                f"b{test['build_number']}",
                int(test["n_threads"]),
                uses_gpu=test["n_gpu_layers"] > 0,
            )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"this is not what `llama-bench -o json` prints ({error})") from error
    raise BadInput("llama-bench tested no decoding: run it with -p 0 -n 64")
