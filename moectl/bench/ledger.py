"""The rows of a bench in the store: written setting by setting, and read again by the same bench to
resume."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

import pyarrow as pa

from artifacts.store.runs import ModelInfo, RunInfo, StoredRun, versions
from artifacts.store.store import Store, add_run
from moectl.show.losses import is_distinguishable
from profilers.compare.bench import BenchResult, BenchSetting
from profilers.compare.tasks import TaskScore
from runtime.control.counters import AT_BITS, altered, hit_rate, is_exact
from runtime.replay.settings import Outcome

COMMAND = "bench"
BY_LAYER = "bench_layers"
LIVE = "live"
SIMULATED = "simulated"
PEER = "peer"
_COUNTS = ("late", "misses", "collisions", "demand_bytes", "prefetch_bytes", "wasted_bytes")
_LAYER_COUNTS = ("requests", "hits", "late", "misses", "collisions", "evictions")
_ARTEFACTS = (
    "profile",
    "build-buddies",
    "quantize",
    "build-maps",
    "learn",
    "build-predictor",
    "split",
)


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One setting, with the columns of the store's table `bench`; None for values that were not
    measured.

    `ttft_quartiles`, `tpot_quartiles` and `drafted_quartiles` belong to the medians above them, the
    last to `drafted_ratio`: the time of a token with drafts over that without. `tasks` are scores,
    `run` is the run in the store, `best` marks the fastest rows of a table, `why` is the reason if
    the setting could not run. `altered` counts requests that were not computed as by the full
    model. `loss_error` is the standard error of `perplexity_ratio`, which was measured on `scored`
    tokens.
    """

    preset: str
    budget: str
    link: str
    mode: str
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tokens_per_s: float | None = None
    hit_rate: float | None = None
    late: int | None = None
    misses: int | None = None
    collisions: int | None = None
    demand_bytes: int | None = None
    prefetch_bytes: int | None = None
    wasted_bytes: int | None = None
    exposed_ms: float | None = None
    peak_fast_bytes: int | None = None
    perplexity_ratio: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    acceptance: float | None = None
    tokens_per_pass: float | None = None
    drafted_tpot_ms: float | None = None
    drafted_ratio: float | None = None
    ttft_quartiles: tuple[float, float] | None = None
    tpot_quartiles: tuple[float, float] | None = None
    drafted_quartiles: tuple[float, float] | None = None
    tasks: tuple[TaskScore, ...] = ()
    altered: int | None = None
    loss_error: float | None = None
    scored: int | None = None
    run: int | None = None
    best: str = ""
    why: str = ""

    @property
    def setting(self) -> BenchSetting:
        return BenchSetting(self.preset, self.budget, self.link)

    @property
    def is_exact(self) -> bool | None:
        """True if the output is that of the full model; None for another program, and for an older
        store that did not count by layer."""
        return is_exact(self.altered)

    @property
    def loss(self) -> float | None:
        """Share of perplexity lost, negative for a gain; None where quality was not measured."""
        return None if self.perplexity_ratio is None else self.perplexity_ratio - 1

    @property
    def is_distinguishable(self) -> bool | None:
        """True if the loss can be distinguished from zero; None where no loss was measured."""
        return None if self.loss is None else is_distinguishable(self.loss, self.loss_error)


_BESIDE = (  # not columns of the table
    "ttft_quartiles",
    "tpot_quartiles",
    "drafted_quartiles",
    "tasks",
    "altered",
    "loss_error",
    "scored",
    "run",
    "best",
    "why",
)


def measured_row(setting: BenchSetting, measured: BenchResult, *, scored: int) -> BenchRow:
    """Return the row of a live setting, with quality on `scored` tokens. A peer has times and
    quality but no counters."""
    ttft = measured.ttft_ms
    tpot = measured.tpot_ms
    ratio = measured.drafted_ratio
    counters = measured.counters
    return BenchRow(
        **asdict(setting),
        mode=LIVE if counters else PEER,
        ttft_ms=ttft.median,
        tpot_ms=tpot.median,
        tokens_per_s=1e3 / tpot.median,
        hit_rate=hit_rate(counters) if counters else None,
        **{name: counters.get(name) for name in _COUNTS},
        exposed_ms=measured.exposed_ms if counters else None,
        peak_fast_bytes=measured.fast_nbytes,
        perplexity_ratio=measured.perplexity_ratio,
        kl=measured.kl,
        top1_agreement=measured.top1_agreement,
        acceptance=measured.acceptance,
        tokens_per_pass=measured.tokens_per_pass,
        drafted_tpot_ms=measured.drafted_tpot_ms,
        drafted_ratio=ratio and ratio.median,
        drafted_quartiles=ratio and (ratio.lower, ratio.upper),
        ttft_quartiles=(ttft.lower, ttft.upper),
        tpot_quartiles=(tpot.lower, tpot.upper),
        altered=altered(counters) if counters else None,
        loss_error=measured.loss_error,
        scored=scored,
    )


def simulated_row(setting: BenchSetting, outcome: Outcome) -> BenchRow:
    """The row of a replayed setting, which has no quality and no quartiles."""
    times = ("ttft_ms", "tpot_ms", "tokens_per_s", "exposed_ms")
    return BenchRow(
        **asdict(setting),
        mode=SIMULATED,
        hit_rate=hit_rate(outcome.counters),
        **{name: outcome.times[name] for name in times},
        **{name: outcome.counters[name] for name in _COUNTS},
        peak_fast_bytes=outcome.fast_nbytes,
        acceptance=outcome.acceptance,
        tokens_per_pass=outcome.tokens_per_pass,
        altered=altered(outcome.counters),
    )


@dataclass(frozen=True, slots=True)
class BenchJob:
    """Identity of a bench: its text or trace, and in `conditions` (JSON values) all else that
    affects its numbers. `tokens` is the number of tokens in the text, `asked` the number asked
    for."""

    data: str
    data_digest: str
    tokens: int
    seed: int
    conditions: Mapping[str, object]
    asked: int | None = None

    @property
    def digest(self) -> str:
        identity = {name: value for name, value in asdict(self).items() if name != "asked"} | {
            "versions": versions()
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


class Ledger:
    """The rows of one bench in a store: read when it starts, written one by one."""

    def __init__(
        self,
        path: Path,
        job: BenchJob,
        *,
        model: ModelInfo | None = None,
        model_id: str | None = None,
    ) -> None:
        """`model` is written to the store unless it is there already; then, or without a model,
        pass `model_id`."""
        self.path = path
        self._job = job
        self._model = model
        self._model_id = model.model_id if model else model_id

    def finished(self) -> dict[BenchSetting, BenchRow]:
        """The newest row of each setting that earlier runs of the same bench wrote."""
        if not self.path.exists():
            return {}
        with Store.open(self.path, read_only=True) as store:
            runs = [run for run in store.runs() if self._is_ours(run)]
            rows = [_row(store, run) for run in runs]
        return {row.setting: row for row in rows}

    def write(
        self,
        row: BenchRow,
        *,
        by_layer: Sequence[Mapping[str, int]],
        started_at: datetime,
        seconds: float,
        beside: Mapping[str, object],
    ) -> BenchRow:
        """Write a row with its counters `by_layer` and further JSON values `beside`; return it with
        its run."""
        info = RunInfo(
            command=COMMAND,
            model_id=self._model_id,
            started_at=started_at,
            seconds=seconds,
            data=self._job.data,
            data_digest=self._job.data_digest,
            tokens=self._job.tokens,
            seed=self._job.seed,
            parameters={
                "job": self._job.digest,
                "spread": {
                    "ttft_ms": row.ttft_quartiles,
                    "tpot_ms": row.tpot_quartiles,
                    "drafted_ratio": row.drafted_quartiles,
                },
                "tasks": [asdict(score) for score in row.tasks],
                "quality": {"loss_error": row.loss_error, "scored": row.scored},
                "tokens_asked": self._job.tokens if self._job.asked is None else self._job.asked,
                **beside,
                **self._job.conditions,
            },
        )
        tables = {COMMAND: bench_table([row])} | (
            {BY_LAYER: layers_table(by_layer)} if by_layer else {}
        )
        return replace(row, run=add_run(self.path, info, tables, model=self._model))

    def _is_ours(self, run: StoredRun) -> bool:
        return run.info.command == COMMAND and run.info.parameters.get("job") == self._job.digest


def bench_table(rows: Sequence[BenchRow]) -> pa.Table:
    """Rows of the store's `bench`."""
    return pa.Table.from_pylist(
        [{name: getattr(row, name) for name in _SCHEMA.names} for row in rows], schema=_SCHEMA
    )


def layers_table(by_layer: Sequence[Mapping[str, int]]) -> pa.Table:
    """Rows of the store's `bench_layers`.

    `few_bits` counts experts computed below full precision, `replaced` the ranks that a stand-in
    served or that were dropped; both are 0 where the output equals that of the full model.
    """
    rows = [
        {
            "layer": layer,
            **{name: counters[name] for name in _LAYER_COUNTS},
            "few_bits": sum(counters[name] for name in AT_BITS.values()),
            "replaced": counters["replaced_ranks"] + counters["dropped_ranks"],
        }
        for layer, counters in enumerate(by_layer)
    ]
    return pa.Table.from_pylist(rows, schema=pa.schema([(name, pa.int64()) for name in rows[0]]))


def artefact_runs(path: Path, model_id: str) -> dict[str, int]:
    """The newest run of each kind of artefact that policies use; part of a bench's identity."""
    if not path.exists():
        return {}
    with Store.open(path, read_only=True) as store:
        runs = {name: store.latest_run(name, model_id) for name in _ARTEFACTS}
    return {name: run.run_id for name, run in runs.items() if run}


def _row(store: Store, run: StoredRun) -> BenchRow:
    [columns] = store.read(COMMAND, run.run_id).to_pylist()
    layers = store.read(BY_LAYER, run.run_id).to_pylist() if BY_LAYER in run.contents else None
    spread = {
        name: values and tuple(values) for name, values in run.info.parameters["spread"].items()
    }
    quality = run.info.parameters.get("quality") or {}  # an earlier moectl wrote none
    return BenchRow(
        **columns,
        ttft_quartiles=spread["ttft_ms"],
        tpot_quartiles=spread["tpot_ms"],
        drafted_quartiles=spread["drafted_ratio"],
        tasks=tuple(TaskScore(**score) for score in run.info.parameters["tasks"]),
        altered=None
        if layers is None
        else sum(layer["few_bits"] + layer["replaced"] for layer in layers),
        loss_error=quality.get("loss_error"),
        scored=quality.get("scored"),
        run=run.run_id,
    )


_TEXTS = ("preset", "budget", "link", "mode")
_WHOLE = (*_COUNTS, "peak_fast_bytes")
_SCHEMA = pa.schema(
    [
        (name, pa.string() if name in _TEXTS else pa.int64() if name in _WHOLE else pa.float64())
        for name in BenchRow.__dataclass_fields__
        if name not in _BESIDE
    ]
)
