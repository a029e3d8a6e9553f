"""Profiles a model's routers on text and writes one run. A profile that was stopped continues where
it stopped."""

import hashlib
import json
import shutil
import time
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from artifacts.common.files import replacing
from artifacts.errors import BadInput, Partly
from artifacts.routing.similarity import Similarity
from artifacts.shape import Shape
from artifacts.store.rows import similarity_rows
from artifacts.store.runs import ModelInfo
from artifacts.store.store import add_run
from artifacts.traces.parquet import read_parquet, to_table, write_parquet
from artifacts.traces.trace import Trace, concatenate
from profilers.routing.distribute import Counted, Counting, Part, parts
from profilers.routing.observe import RoutingForesight, RoutingProfile, observe
from profilers.routing.similarity import measure_similarity
from profilers.routing.tables import tables
from profilers.text.batches import Batch, Batching, Data
from profilers.text.run import TextRun, computed_on
from profilers.workers.workers import Executor, Workers, listed_losses
from runtime.session.session import Session

PROFILE = "profile"
SHARD = "profile-shard"
_KEEP_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Profiled:
    """A profile that was written; an earlier run that was stopped had counted `resumed` of its
    batches."""

    run_id: int
    profile: RoutingProfile
    num_tokens: int
    seconds: float
    resumed: int
    shortfall: str = ""  # as in `Data`


def profile_routing(
    session: Session,
    data: Data,
    batching: Batching,
    *,
    model: ModelInfo,
    store_path: Path,
    keep_trace: RoutingForesight | None = None,
    num_samples: int = 0,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profiled:
    """Profile a model's routers and write the run. `progress` is told the tokens done and the
    tokens of all batches.

    A shard's run is called `profile-shard`; `shards.merge_shards` makes one profile of all shards.
    `num_samples` tokens, divided among the shards, measure how well each expert replaces another.
    The workers of an `executor` open the model by its name and count on one thread each; without
    one the session counts. Raises Partly for lost batches.
    """
    run = TextRun(data)
    batches = batching.batches(data.sequences)
    if not batches:
        raise BadInput(
            f"shard {batching.index + 1}/{batching.count} has no data: ask for fewer shards or "
            "more tokens"
        )
    settings = asdict(batching) | _trace_parameters(keep_trace)
    half_done = HalfDone(store_path, {"model": model.fingerprint, "data": run.digest, **settings})
    counts = _Counts(model.shape, batches, half_done, progress)
    if executor is None or executor.is_here:
        counts.here(session, batching.prefill, keep_trace)
    else:
        counts.spread(Counting(model.name, session, batching.prefill, keep_trace), executor)
    rows = tables(counts.profile)
    if num_samples:
        counts.keep()
        rows["similarity"] = similarity_rows(
            _similarity(session, batches, batching, num_samples, data.seed)
        )
    if keep_trace:
        rows["traces"] = to_table(half_done.trace(len(batches)))
    command = PROFILE if batching.count == 1 else SHARD
    threads = None if executor is None or executor.is_here else 1
    parameters = settings | {"samples": num_samples} | computed_on(session.opened, threads=threads)
    info = run.info(command, model, parameters, num_tokens=counts.total)
    run_id = add_run(store_path, info, rows, model=model)
    half_done.remove()
    return Profiled(
        run_id, counts.profile, counts.total, info.seconds, counts.resumed, data.shortfall
    )


def _trace_parameters(keep_trace: RoutingForesight | None) -> dict[str, object]:
    """The run's parameters that say whether it keeps a trace, and of how many layers ahead."""
    if keep_trace is None:
        return {"trace": False}
    learned = keep_trace.predictor.distance if keep_trace.predictor else 0
    return {"trace": True, "distance": keep_trace.distance, "learned": learned}


class HalfDone:
    """The folder of one profile under way, beside the store, so that the same command continues it;
    `identity` holds everything that its numbers depend on."""

    def __init__(self, store_path: Path, identity: Mapping[str, object]) -> None:
        digest = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()[
            :16
        ]
        self.folder = store_path.with_name(f"{store_path.name}.profile-{digest}")
        self._state = self.folder / "state.npz"

    def load(self) -> tuple[RoutingProfile, set[int]] | None:
        """Return the counts so far and the batches counted, None without a file. Raises BadInput
        for a damaged one."""
        if not self._state.is_file():
            return None
        try:
            with np.load(self._state) as arrays:
                return RoutingProfile.from_arrays(arrays), set(arrays["batches"].tolist())
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise BadInput(
                f"{self._state} is damaged: remove {self.folder}, and the profile begins anew"
            ) from error

    def keep(self, profile: RoutingProfile, batches: Collection[int]) -> None:
        self.folder.mkdir(exist_ok=True)
        with replacing(self._state) as temporary, temporary.open("wb") as file:
            np.savez(file, batches=np.array(sorted(batches), np.int64), **profile.arrays())

    def keep_trace(self, trace: Trace, batch: int) -> None:
        self.folder.mkdir(exist_ok=True)
        write_parquet(trace, self._trace_path(batch))

    def trace(self, num_batches: int) -> Trace:
        """Return the kept traces of the first `num_batches` batches, in order."""
        return concatenate([read_parquet(self._trace_path(batch)) for batch in range(num_batches)])

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _trace_path(self, batch: int) -> Path:
        return self.folder / f"trace-{batch:06d}.parquet"


class _Counts:
    """A profile under way, taken up where an earlier run stopped and kept beside the store every
    few seconds.

    `done` are the numbers of the batches that it holds, `resumed` how many of them it was taken up
    with; `total` are the tokens of all batches.
    """

    def __init__(
        self,
        shape: Shape,
        batches: Sequence[Batch],
        half_done: HalfDone,
        progress: Callable[[int, int], None],
    ) -> None:
        self.profile, self.done = half_done.load() or (
            RoutingProfile(shape.num_layers, shape.num_experts),
            set(),
        )
        self.resumed = len(self.done)
        self.total = sum(batch.num_tokens for batch in batches)
        self._batches = batches
        self._half_done = half_done
        self._progress = progress
        self._num_tokens = sum(batches[number].num_tokens for number in self.done)
        self._kept_at_s = time.monotonic()

    def missing(self) -> list[int]:
        return [number for number in range(len(self._batches)) if number not in self.done]

    def keep(self) -> None:
        """Write the counts so far beside the store."""
        self._half_done.keep(self.profile, self.done)
        self._kept_at_s = time.monotonic()

    def add(self, part: Part, traces: Sequence[Trace | None]) -> None:
        """Note batches that the profile now holds, and keep their traces."""
        for number, trace in zip(part, traces, strict=True):
            if trace is not None:
                self._half_done.keep_trace(trace, number)
        self.done.update(part)
        if time.monotonic() - self._kept_at_s > _KEEP_EVERY_S:
            self.keep()
        self._num_tokens += sum(self._batches[number].num_tokens for number in part)
        self._progress(self._num_tokens, self.total)

    def here(self, session: Session, prefill: int, keep_trace: RoutingForesight | None) -> None:
        """Count the missing batches in this process, one after another."""
        missing = self.missing()
        batches = [self._batches[number] for number in missing]
        running = observe(
            session, batches, prefill=prefill, profile=self.profile, keep_trace=keep_trace
        )
        for number, (_, trace) in zip(missing, running, strict=True):
            self.add((number,), (trace,))

    def spread(self, work: Counting, executor: Executor) -> None:
        """Have workers count the missing batches. The sums are exact, so the order of the results
        does not matter.

        Raises Partly when some batches could not be counted.
        """

        def take(counted: Counted) -> None:
            self.profile.merge(RoutingProfile.from_arrays(counted.arrays))
            self.add(counted.part, counted.traces)

        def submit(part: Part) -> None:
            workers.submit((part, [self._batches[number] for number in part]), part)

        def again(part: Part) -> None:
            for number in part:  # one by one, so that a batch that fails takes no other with it
                submit((number,))

        with Workers(work, executor, take) as workers:
            for part in parts(self.missing(), executor, is_traced=work.is_traced):
                submit(part)
            lost = workers.persist(again)
        if lost:
            self.keep()
            if not self.done:
                raise next(iter(lost.values()))
            names = [f"{number + 1}" for part in sorted(lost) for number in part]
            of = f"{len(self._batches)} batches"
            raise Partly(listed_losses(lost, of, "counted", names))


def _similarity(
    session: Session, batches: Sequence[Batch], batching: Batching, num_samples: int, seed: int
) -> Similarity:
    """Measure the shard's share of the samples on its own text."""
    sequences = [sequence for batch in batches for sequence in batch.sequences]
    session.engine.uninstall()
    try:
        return measure_similarity(
            session.opened,
            sequences,
            num_samples=-(-num_samples // batching.count),
            batch=batching.batch,
            seed=seed,
        )
    finally:
        session.engine.install()
