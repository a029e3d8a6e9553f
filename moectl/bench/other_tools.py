"""Results that other tools measured, beside our own: `llama-bench -o json`, `vllm bench serve --save-result`."""

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
from moectl.bench.ledger import Row, bench_table

IMPORTED = "imported"
COMMAND = "bench-import"
_FORMS = "give what `llama-bench -o json` or `vllm bench serve --save-result` wrote"
_NOWHERE = "-"  # a budget or a link that the other tool does not tell


@dataclass(frozen=True, slots=True)
class Imported:
    """The rows of one file; `note` says under what conditions they were measured, as far as the file tells."""

    name: str
    digest: str
    rows: Sequence[Row]
    note: str


def read_results(path: Path) -> Imported:
    """Raises BadInput for a file that is of neither tool."""
    try:
        text = path.read_text(encoding="utf-8")
        found = parse_json(text)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as JSON: {_FORMS}") from error
    objects = found if isinstance(found, list) else [found]
    rows, conditions = [], {}
    for one in objects:
        reader = _reader(one, path)
        try:
            row, told = reader(one)
        except (ArithmeticError, IndexError, TypeError, ValueError) as error:
            raise BadInput(f"{path} has results that are no numbers: {_FORMS}") from error
        rows.append(row)
        conditions[told] = None
    if not rows:
        raise BadInput(f"{path} holds no results: {_FORMS}")
    note = f"imported from {path.name}, measured elsewhere and on another text: {'; '.join(conditions)}"
    return Imported(path.name, hashlib.sha256(text.encode()).hexdigest(), rows, note)


def keep(imported: Imported, *, store: Path) -> list[Row]:
    """The rows with the run that holds them, which is written unless the store has this very file."""
    with Store.open(store) as held:
        known = [run for run in held.runs() if (run.info.command, run.info.data_digest) == (COMMAND, imported.digest)]
        run_id = known[-1].run_id if known else held.write_run(_info(imported), {"bench": bench_table(imported.rows)})
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


def _reader(one: object, path: Path) -> Callable[[Mapping], tuple[Row, str]]:
    """By the fields that only the one tool writes."""
    if isinstance(one, Mapping) and {"build_commit", "n_prompt", "n_gen", "samples_ns"} <= one.keys():
        return _llama
    if isinstance(one, Mapping) and {"median_ttft_ms", "median_tpot_ms", "output_throughput"} <= one.keys():
        return _vllm
    raise BadInput(f"{path} is not of a tool that is known: {_FORMS}")


def _llama(one: Mapping) -> tuple[Row, str]:
    """Samples are times of a whole test: of a prompt (pp), or of so many tokens (tg)."""
    prompt, generated = one["n_prompt"], one["n_gen"]
    depth = f" @ d{one['n_depth']}" if one.get("n_depth") else ""
    layers = f"-ngl {one.get('n_gpu_layers', '?')}, --n-cpu-moe {one.get('n_cpu_moe', '?')}"
    told = f"llama.cpp {one['build_commit']}, {one.get('model_type')}, {one.get('gpu_info') or one.get('cpu_info')}"
    if prompt and generated:
        why = "llama-bench timed prompt and answer together: give -p and -n, not -pg"
        return _row(f"llama.cpp pp{prompt}+tg{generated}{depth}", layers, why=why), told
    milliseconds = np.array(one["samples_ns"], np.float64) / 1e6 / (generated or 1)
    if milliseconds.ndim != 1 or not (milliseconds > 0).all() or not np.isfinite(milliseconds).all():
        raise ValueError(f"times of {milliseconds} ms")
    lower, median, upper = map(float, np.percentile(milliseconds, (25, 50, 75)))
    if generated:
        times = {"tpot_ms": median, "tpot_quartiles": (lower, upper), "tokens_per_s": 1e3 / median}
        return _row(f"llama.cpp tg{generated}{depth}", layers, **times), told
    return _row(f"llama.cpp pp{prompt}{depth}", layers, ttft_ms=median, ttft_quartiles=(lower, upper)), told


def _vllm(one: Mapping) -> tuple[Row, str]:
    """Tokens a second are of all requests together, so that with several at once they are not 1 over TPOT."""
    told = (
        f"vLLM, {one.get('model_id')}, {one.get('completed', '?')} requests at {one.get('request_rate', '?')} a second"
    )
    names = {"ttft_ms": "median_ttft_ms", "tpot_ms": "median_tpot_ms", "tokens_per_s": "output_throughput"}
    times = {name: float(one[theirs]) for name, theirs in names.items()}
    if not all(0 <= value < math.inf for value in times.values()):
        raise ValueError(f"times of {times}")
    return _row("vllm serve", _NOWHERE, **times), told


def _row(name: str, link: str, **known: object) -> Row:
    return Row(preset=name, budget=_NOWHERE, link=link, mode=IMPORTED, **known)
