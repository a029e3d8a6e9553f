"""Import of results that other tools measured: `llama-bench -o json` and `vllm bench serve
--save-result`."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from artifacts.common.untrusted import parse_json
from artifacts.errors import BadInput
from artifacts.store.runs import RunInfo, utc_now
from artifacts.store.store import Store
from moectl.bench.ledger import BenchRow, bench_table

IMPORTED = "imported"
COMMAND = "bench-import"
_FORMS = "give what `llama-bench -o json` or `vllm bench serve --save-result` wrote"
_NOWHERE = "-"  # a budget or a link that the other tool does not report


@dataclass(frozen=True, slots=True)
class Imported:
    """The rows of one file; `note` names the conditions of the measurement, as far as the file
    states them."""

    name: str
    digest: str
    rows: Sequence[BenchRow]
    note: str


def read_results(path: Path) -> Imported:
    """Read a file of results. Raises BadInput for a file of neither tool."""
    try:
        text = path.read_text(encoding="utf-8")
        parsed = parse_json(text)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as JSON: {_FORMS}") from error
    results = parsed if isinstance(parsed, list) else [parsed]
    rows = []
    conditions = {}
    for result in results:
        reader = _reader(result, path)
        try:
            row, condition = reader(result)
        except (ArithmeticError, IndexError, TypeError, ValueError) as error:
            raise BadInput(f"{path} has results that are no numbers: {_FORMS}") from error
        rows.append(row)
        conditions[condition] = None
    if not rows:
        raise BadInput(f"{path} holds no results: {_FORMS}")
    note = (
        f"imported from {path.name}, measured elsewhere and on another text: "
        f"{'; '.join(conditions)}"
    )
    return Imported(path.name, hashlib.sha256(text.encode()).hexdigest(), rows, note)


def keep(imported: Imported, *, store: Path) -> list[BenchRow]:
    """Return the rows with the run that holds them; the run is written unless the store has the
    same file already."""
    with Store.open(store) as held:
        known = [
            run for run in held.runs(command=COMMAND) if run.info.data_digest == imported.digest
        ]
        run_id = (
            known[-1].run_id
            if known
            else held.write_run(_info(imported), {"bench": bench_table(imported.rows)})
        )
    return [replace(row, run=run_id) for row in imported.rows]


def _info(imported: Imported) -> RunInfo:
    return RunInfo(
        command=COMMAND,
        model_id=None,
        started_at=utc_now(),
        seconds=0.0,
        data=imported.name,
        data_digest=imported.digest,
        parameters={"conditions": imported.note},
    )


def _reader(result: object, path: Path) -> Callable[[Mapping], tuple[BenchRow, str]]:
    """Choose the reader by fields that only one tool writes."""
    if (
        isinstance(result, Mapping)
        and {"build_commit", "n_prompt", "n_gen", "samples_ns"} <= result.keys()
    ):
        return _llama
    if (
        isinstance(result, Mapping)
        and {"median_ttft_ms", "median_tpot_ms", "output_throughput"} <= result.keys()
    ):
        return _vllm
    raise BadInput(f"{path} is not of a tool that is known: {_FORMS}")


def _llama(result: Mapping) -> tuple[BenchRow, str]:
    """A result of llama-bench, whose samples time a whole test: one prompt (pp) or several
    generated tokens (tg)."""
    prompt = result["n_prompt"]
    generated = result["n_gen"]
    depth = f" @ d{result['n_depth']}" if result.get("n_depth") else ""
    layers = f"-ngl {result.get('n_gpu_layers', '?')}, --n-cpu-moe {result.get('n_cpu_moe', '?')}"
    processor = result.get("gpu_info") or result.get("cpu_info")
    condition = f"llama.cpp {result['build_commit']}, {result.get('model_type')}, {processor}"
    if prompt and generated:
        why = "llama-bench timed prompt and answer together: give -p and -n, not -pg"
        return _row(f"llama.cpp pp{prompt}+tg{generated}{depth}", layers, why=why), condition
    milliseconds = np.array(result["samples_ns"], np.float64) / 1e6 / (generated or 1)
    if (
        milliseconds.ndim != 1
        or not (milliseconds > 0).all()
        or not np.isfinite(milliseconds).all()
    ):
        raise ValueError(f"times of {milliseconds} ms")
    lower, median, upper = map(float, np.percentile(milliseconds, (25, 50, 75)))
    if generated:
        times = {"tpot_ms": median, "tpot_quartiles": (lower, upper), "tokens_per_s": 1e3 / median}
        return _row(f"llama.cpp tg{generated}{depth}", layers, **times), condition
    return _row(
        f"llama.cpp pp{prompt}{depth}", layers, ttft_ms=median, ttft_quartiles=(lower, upper)
    ), condition


def _vllm(result: Mapping) -> tuple[BenchRow, str]:
    """A result of vLLM. Its tokens a second cover all concurrent requests, so they need not be 1
    over TPOT."""
    rate = f"{result.get('completed', '?')} requests at {result.get('request_rate', '?')} a second"
    condition = f"vLLM, {result.get('model_id')}, {rate}"
    names = {
        "ttft_ms": "median_ttft_ms",
        "tpot_ms": "median_tpot_ms",
        "tokens_per_s": "output_throughput",
    }
    times = {name: float(result[theirs]) for name, theirs in names.items()}
    if not all(0 <= value < math.inf for value in times.values()):
        raise ValueError(f"times of {times}")
    return _row("vllm serve", _NOWHERE, **times), condition


def _row(name: str, link: str, **known: object) -> BenchRow:
    return BenchRow(preset=name, budget=_NOWHERE, link=link, mode=IMPORTED, **known)
