"""`moectl advise --verify`: the speed that was predicted, beside what the engine gives."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median

from artifacts.common.host_memory import num_cores
from artifacts.errors import BadInput, BadUsage, first_line
from artifacts.store.runs import RunInfo, utc_now
from artifacts.store.store import Store, add_run
from artifacts.store.verifications import (
    ENOUGH,
    TABLE,
    Verification,
    interval,
    to_rows,
    verifications_of,
)
from moectl.bundled import as_named, demo_model
from moectl.cli.options import EngineOptions
from moectl.commands.start.advise.answer import rounded
from moectl.commands.start.advise.engines import engine_of
from moectl.commands.start.advise.llama_cpu import SPREAD, CpuWork, tokens_per_second
from moectl.shared.terminal.progress import Phases
from profilers.hardware.this_machine import LocalMachine
from runtime.model.gguf.config import read_headers

LLAMA_CPP = "llama.cpp"
MOECTL = "moectl"
RUNS = 7
TOKENS = 32
QUIET = 0.1
"""Spread of runs above which something else used the machine."""

_EVALUATED = re.compile(r"(?<!prompt )eval time = +[\d.]+ ms / +\d+ (?:tokens|runs).*?([\d.]+) tok")


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens a second of each run of an engine, with its version, threads and the clock."""

    rates: tuple[float, ...]
    version: str
    threads: int
    clock: str = ""

    @property
    def spread(self) -> float:
        return (max(self.rates) - min(self.rates)) / median(self.rates)


def verified(
    model: str,
    engine: str,
    *,
    threads: int | None,
    log: Path | None,
    store: Path,
    near_gbps: float | None = None,
) -> str:
    """Compare an engine on this machine's CPU with what is predicted, where memory has `near_gbps`
    if that is known; keep both in the store, and return the line that tells them. Raises BadUsage
    or BadInput."""
    engine = engine_of(engine).name
    if engine == LLAMA_CPP:
        number = threads or num_cores()
        number = threads or num_cores()
        return verify_llama_cpp(
            Path(model), threads=number, log=log, store=store, near_gbps=near_gbps
        )
    if engine == MOECTL and log is None:
        return verify_moectl(model, threads=threads, store=store)
    raise BadUsage(f"--verify compares llama.cpp or moectl, not {engine}, and logs of llama.cpp")


def verify_moectl(model: str, *, threads: int | None, store: Path) -> str:
    """Measure this machine's costs with the model, predict a short run from its trace, and run it.

    Predicted at the pace of the run: other work on the machine slows both. Raises as
    `doctor.measured.diagnose` does.
    """
    from moectl.commands.start.doctor.measured import diagnose
    from moectl.shared.opening import open_quietly

    started_at = utc_now()
    name = as_named(model) or str(demo_model())
    options = EngineOptions() if threads is None else EngineOptions(threads=threads)
    with Phases(8, 1, 4) as phases:
        diagnosis = diagnose(name, options, phases, named=None, store=store)
    found = diagnosis.prediction
    machine = diagnosis.measured.profile.conditions
    predicted_ms = found.measured_ms * found.ratio_at_pace
    verification = Verification(
        model=Path(name).name,
        digest=open_quietly(name, device=options.device).fingerprint,
        engine=MOECTL,
        version=metadata.version(MOECTL),
        machine=f"{machine['device_name']}, {machine['cores']} cores",
        setting=f"budget {found.budget}, {options.threads} threads",
        predicted=1e3 / predicted_ms,
        measured=1e3 / found.measured_ms,
        spread=0.0,
        runs=found.tokens,
    )
    earlier = kept(store, verification, started_at)
    return line(verification, earlier, clock=f", pace {found.pace:.2f}")


def verify_llama_cpp(
    path: Path, *, threads: int, log: Path | None, store: Path, near_gbps: float | None
) -> str:
    """Predict llama.cpp on this CPU, measure it, keep both in the store; return the line that tells
    them. Raises BadUsage or BadInput."""
    if not path.is_file() or path.suffix != ".gguf":
        raise BadUsage(f"{path} is no GGUF file: --verify runs llama.cpp on one, name it by path")
    work = CpuWork.of(path)
    started_at = utc_now()
    measured = from_log(log, threads) if log else run_llama_cpp(path, threads)
    predicted = tokens_per_second(work, measured.threads, near_gbps)
    verification = Verification(
        model=path.name,
        digest=read_headers(path)[0].digest.hex(),
        engine=LLAMA_CPP,
        version=measured.version,
        machine=here(measured.threads),
        setting=f"CPU, {measured.threads} threads",
        predicted=predicted,
        measured=median(measured.rates),
        spread=measured.spread,
        runs=len(measured.rates),
    )
    return line(verification, kept(store, verification, started_at), clock=measured.clock)


def here(threads: int) -> str:
    """Return the name of this machine: its processor and cores."""
    local = LocalMachine.glance("cpu", threads)
    return f"{local.processor}, {local.cores} cores"


def kept(store: Path, verification: Verification, started_at: object) -> list[Verification]:
    """Write a verification; return those of that engine and machine before it."""
    earlier = []
    if store.exists():
        with Store.open(store, read_only=True) as opened:
            earlier = verifications_of(opened, verification.engine, verification.machine)
    info = RunInfo("advise", None, started_at, (utc_now() - started_at).total_seconds())
    add_run(store, info, {TABLE: to_rows([verification])})
    return earlier


def line(verification: Verification, earlier: Sequence[Verification], *, clock: str = "") -> str:
    """Return what was predicted and measured, and by how much they differ."""
    predicted = verification.predicted
    low, high = interval(earlier, predicted) or (predicted / (1 + SPREAD), predicted * (1 + SPREAD))
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
        asked = ["-m", path, "-t", threads, "-ngl", 0, "-p", 0, "-n", TOKENS, "-r", RUNS]
        done = subprocess.run(
            [program, *map(str, asked), "-o", "json"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise BadInput(f"llama-bench failed: {first_line(RuntimeError(done.stderr))}")
        return _of_bench(json.loads(done.stdout))
    from profilers.compare.llama_cpp import PACKAGE, LlamaCpp, check_installed

    check_installed()
    llama = LlamaCpp(path, threads=threads, num_tokens=TOKENS + 8, vocab_size=0)
    # waiting threads spin, so that only the time of a single one is all work
    which = threads == 1
    runs = [llama.token_seconds(TOKENS, seed=seed)[which] for seed in range(RUNS + 1)][1:]
    version = f"b{metadata.version(PACKAGE).rpartition('.')[2]}"
    rates = tuple(1 / each for each in runs)
    return Measured(rates, version, threads, ", processor time" * which)


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
    """Return the last test that only decodes on the CPU. Raises BadInput."""
    for test in reversed(tests):
        try:
            if test["n_prompt"] == 0 and test["n_gen"] > 0 and test["n_gpu_layers"] == 0:
                rates = tuple(map(float, test["samples_ts"]))
                return Measured(rates, f"b{test['build_number']}", int(test["n_threads"]))
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"this is not what `llama-bench -o json` prints ({error})") from error
    raise BadInput("llama-bench tested no decoding on the CPU: run it with -p 0 -n 64 -ngl 0")
