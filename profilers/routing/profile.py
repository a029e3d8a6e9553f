"""A whole profile: text in, one run in the store out; stopped half-way it goes on where it was."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from artifacts.errors import BadInput, Partly
from artifacts.routing.similarity import Similarity
from artifacts.store.rows import similarity_matrices, similarity_rows
from artifacts.store.runs import ModelInfo, RunInfo, StoredRun, utc_now, versions
from artifacts.store.store import Store, add_run
from artifacts.traces.parquet import from_table, to_table
from artifacts.traces.trace import Trace, concatenate
from profilers.routing.distribute import Counted, Counting, Part, parts
from profilers.routing.observe import Foresight, RoutingProfile, observe
from profilers.routing.resume import HalfDone
from profilers.routing.similarity import measure_similarity
from profilers.routing.tables import stored, tables
from profilers.text.batches import Batch, Batching, Data
from profilers.text.corpus import data_digest
from profilers.workers.workers import ATTEMPTS, Executor, Lost, Workers
from runtime.session.session import Session

PROFILE, SHARD = "profile", "profile-shard"
_KEEP_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Profiled:
    """What a profile left in the store; `resumed` batches were done by an earlier, stopped run."""

    run_id: int
    profile: RoutingProfile
    num_tokens: int
    seconds: float
    resumed: int


def profile_routing(
    session: Session,
    data: Data,
    batching: Batching,
    *,
    model: ModelInfo,
    store_path: Path,
    keep_trace: Foresight | None = None,
    num_samples: int = 0,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profiled:
    """Profile a model's routers and write the run. `progress` hears of tokens done and tokens in all.

    A shard's run is called `profile-shard`; `merge_shards` makes a profile of all of them. With `num_samples`, divided
    among the shards, it also measures what experts are worth in each other's place. With an `executor` its workers
    open the model by its name and count, one thread each; else the session does. Raises Partly when some batches could
    not be done.
    """
    started_at, start_s = utc_now(), time.monotonic()
    digest = data_digest(data.sequences)
    settings = asdict(batching) | _kept(keep_trace)
    half_done = HalfDone(store_path, {"model": model.fingerprint, "data": digest, **settings})
    batches = batching.batches(data.sequences)
    if not batches:
        raise BadInput(f"shard {batching.index + 1}/{batching.count} has no data: ask for fewer shards or more tokens")
    profile, done = half_done.load() or (RoutingProfile(model.shape.num_layers, model.shape.num_experts), set())
    resumed, counts = len(done), _Counts(profile, done, batches, half_done, progress)
    if executor is None or executor.is_here:
        counts.here(session, batching.prefill, keep_trace)
    else:
        work = Counting(model.name, session.opened, session.parts.settings, batching.prefill, keep_trace)
        counts.spread(work, executor, is_traced=keep_trace is not None)
    rows = tables(profile)
    if num_samples:
        half_done.keep(profile, counts.done)
        similarity = _similarity(session, batches, batching, num_samples=num_samples, seed=data.seed)
        rows["similarity"] = similarity_rows(similarity)
    if keep_trace:
        rows["traces"] = to_table(half_done.trace(len(batches)))
    info = RunInfo(
        command=PROFILE if batching.count == 1 else SHARD,
        model_id=model.model_id,
        started_at=started_at,
        seconds=time.monotonic() - start_s,
        data=data.spec,
        data_digest=digest,
        tokens=counts.total,
        seed=data.seed,
        parameters=settings | {"samples": num_samples},
    )
    run_id = add_run(store_path, info, rows, model=model)
    half_done.remove()
    return Profiled(run_id, profile, counts.total, info.seconds, resumed)


def _kept(keep_trace: Foresight | None) -> dict[str, object]:
    """What of the layers ahead the trace of a run says, for its parameters."""
    if keep_trace is None:
        return {"trace": False}
    learned = keep_trace.predictor.distance if keep_trace.predictor else 0
    return {"trace": True, "distance": keep_trace.distance, "learned": learned}


class _Counts:
    """A profile under way: `done` are the numbers of the batches that it holds, kept beside the store every few
    seconds."""

    def __init__(
        self,
        profile: RoutingProfile,
        done: set[int],
        batches: Sequence[Batch],
        half_done: HalfDone,
        progress: Callable[[int, int], None],
    ) -> None:
        self.done, self._profile, self._batches = done, profile, batches
        self._half_done, self._progress = half_done, progress
        self._num_tokens = sum(batches[at].num_tokens for at in done)
        self.total = sum(batch.num_tokens for batch in batches)
        self._kept_at_s = time.monotonic()

    def missing(self) -> list[int]:
        return [at for at in range(len(self._batches)) if at not in self.done]

    def add(self, part: Part, traces: Sequence[Trace | None]) -> None:
        """Note batches that the profile now holds, and keep their traces."""
        for at, trace in zip(part, traces, strict=True):
            if trace is not None:
                self._half_done.keep_trace(trace, at)
        self.done.update(part)
        if time.monotonic() - self._kept_at_s > _KEEP_EVERY_S:
            self._half_done.keep(self._profile, self.done)
            self._kept_at_s = time.monotonic()
        self._num_tokens += sum(self._batches[at].num_tokens for at in part)
        self._progress(self._num_tokens, self.total)

    def here(self, session: Session, prefill: int, keep_trace: Foresight | None) -> None:
        """Do what is missing, one batch after another."""
        missing = self.missing()
        batches = [self._batches[at] for at in missing]
        running = observe(session, batches, prefill=prefill, profile=self._profile, keep_trace=keep_trace)
        for at, (_, trace) in zip(missing, running, strict=True):
            self.add((at,), (trace,))

    def spread(self, work: Counting, executor: Executor, *, is_traced: bool) -> None:
        """Have what is missing done by workers; sums are exact, so that their order does not matter."""

        def heard(counted: Counted) -> None:
            self._profile.merge(RoutingProfile.from_arrays(counted.arrays))
            self.add(counted.part, counted.traces)

        def submit(part: Part) -> None:
            workers.submit((part, [self._batches[at] for at in part]), part)

        def again(part: Part) -> None:
            for at in part:  # one by one, so that what is lost is no more than has to be
                submit((at,))

        with Workers(work, executor, heard) as workers:
            for part in parts(self.missing(), executor, is_traced=is_traced):
                submit(part)
            lost = workers.persist(again)
        if lost:
            self._half_done.keep(self._profile, self.done)
            raise Partly(self._what_is_lost(lost)) if self.done else next(iter(lost.values()))

    def _what_is_lost(self, lost: Lost) -> str:
        listed = ", ".join(f"{at + 1}" for part in sorted(lost) for at in part)
        reason = str(next(iter(lost.values()))).strip().splitlines()[-1]
        return (
            f"{len(lost)} of {len(self._batches)} batches were tried {ATTEMPTS} times and could not be counted: "
            f"{listed}; all others are kept, and the same command tries these again. Of the first: {reason}"
        )


def _similarity(
    session: Session, batches: Sequence[Batch], batching: Batching, *, num_samples: int, seed: int
) -> Similarity:
    """A shard measures its share of the samples, on its own text."""
    sequences = [sequence for batch in batches for sequence in batch.sequences]
    session.engine.uninstall()
    try:
        return measure_similarity(
            session.opened, sequences, num_samples=-(-num_samples // batching.count), batch=batching.batch, seed=seed
        )
    finally:
        session.engine.install()


def merge_shards(paths: Sequence[Path], *, into: Path) -> Profiled:
    """Add the shard runs of several stores to one profile. Raises BadInput unless all of the newest are there."""
    started_at, start_s = utc_now(), time.monotonic()
    shards = _whole([shard for path in paths for shard in _shards(path)])
    model, info = shards[0].model, shards[0].run.info
    profile = RoutingProfile(model.shape.num_layers, model.shape.num_experts)
    for shard in shards:
        profile.merge(shard.profile)
    rows = tables(profile)
    if all(shard.similarity is not None for shard in shards):
        rows["similarity"] = similarity_rows(Similarity.merge([shard.similarity for shard in shards]))
    if all(shard.trace is not None for shard in shards):
        trace = concatenate([from_table(shard.trace, num_experts=model.shape.num_experts) for shard in shards])
        rows["traces"] = to_table(trace.take(np.argsort(trace.request, kind="stable")))
    merged = replace(
        info,
        command=PROFILE,
        started_at=started_at,
        seconds=time.monotonic() - start_s,
        tokens=sum(shard.run.info.tokens for shard in shards),
        parameters=dict(info.parameters) | {"index": 0, "count": 1, "shards": len(shards)},
        versions=versions(),
    )
    return Profiled(add_run(into, merged, rows, model=model), profile, merged.tokens, merged.seconds, resumed=0)


def _whole(shards: list["_Shard"]) -> list["_Shard"]:
    """All shards of the profile that the newest belongs to, in order. Raises BadInput when some are missing."""
    if not shards:
        raise BadInput("these stores hold no profile shards: make them with moectl profile --shard i/N")
    newest = max(shards, key=lambda shard: shard.run.info.started_at)
    group = {shard.index: shard for shard in shards if shard.whole == newest.whole}
    missing = [f"{index + 1}/{newest.count}" for index in range(newest.count) if index not in group]
    if missing:
        raise BadInput(f"shards {', '.join(missing)} of this profile are in none of the stores: profile them first")
    return [group[index] for index in range(newest.count)]


@dataclass(frozen=True, slots=True)
class _Shard:
    run: StoredRun
    model: ModelInfo
    profile: RoutingProfile
    trace: pa.Table | None
    similarity: Similarity | None

    @property
    def index(self) -> int:
        return self.run.info.parameters["index"]

    @property
    def count(self) -> int:
        return self.run.info.parameters["count"]

    @property
    def whole(self) -> tuple:
        """What shards of one profile share."""
        shared = {name: value for name, value in self.run.info.parameters.items() if name != "index"}
        return self.model.fingerprint, self.run.info.data_digest, tuple(sorted(shared.items()))


def _shards(path: Path) -> list[_Shard]:
    with Store.open(path, read_only=True) as store:
        models = {model.model_id: model for model in store.models()}
        runs = [run for run in store.runs() if run.info.command == SHARD]
        return [_shard(store, run, models[run.info.model_id]) for run in runs]


def _shard(store: Store, run: StoredRun, model: ModelInfo) -> _Shard:
    trace = store.read("traces", run.run_id) if "traces" in run.contents else None
    similarity = None
    if "similarity" in run.contents:
        size = (model.shape.num_layers, model.shape.num_experts)
        similarity = similarity_matrices(store.read("similarity", run.run_id), *size)
    return _Shard(run, model, stored(store, run.run_id, model.shape), trace, similarity)
