"""Merges the shards of a profile, which several runs counted, into the whole profile."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from artifacts.errors import BadInput
from artifacts.routing.similarity import Similarity
from artifacts.store.rows import similarity_matrices, similarity_rows
from artifacts.store.runs import ModelInfo, StoredRun, utc_now, versions
from artifacts.store.store import Store, add_run
from artifacts.traces.parquet import from_table, to_table
from artifacts.traces.trace import concatenate
from profilers.routing.observe import RoutingProfile
from profilers.routing.profile import PROFILE, SHARD, Profiled
from profilers.routing.tables import stored, tables


def merge_shards(paths: Sequence[Path], *, into: Path) -> Profiled:
    """Merge the shard runs of several stores into one profile, the newest. Raises BadInput when a
    shard is missing."""
    started_at = utc_now()
    start_s = time.monotonic()
    shards = _whole([shard for path in paths for shard in _shards(path)])
    model = shards[0].model
    info = shards[0].run.info
    profile = RoutingProfile(model.shape.num_layers, model.shape.num_experts)
    for shard in shards:
        profile.merge(shard.profile)
    rows = tables(profile)
    if all(shard.similarity is not None for shard in shards):
        rows["similarity"] = similarity_rows(
            Similarity.merge([shard.similarity for shard in shards])
        )
    if all(shard.trace is not None for shard in shards):
        trace = concatenate(
            [from_table(shard.trace, num_experts=model.shape.num_experts) for shard in shards]
        )
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
    run_id = add_run(into, merged, rows, model=model)
    shortfall = str(merged.parameters.get("shortfall", ""))
    return Profiled(run_id, profile, merged.tokens, merged.seconds, resumed=0, shortfall=shortfall)


def _whole(shards: list["_Shard"]) -> list["_Shard"]:
    """Return all shards of the newest shard's profile, in order. Raises BadInput when some are
    missing."""
    if not shards:
        raise BadInput(
            "these stores hold no profile shards: make them with moectl profile --shard i/N"
        )
    newest = max(shards, key=lambda shard: shard.run.info.started_at)
    group = {shard.index: shard for shard in shards if shard.whole == newest.whole}
    missing = [f"{index + 1}/{newest.count}" for index in range(newest.count) if index not in group]
    if missing:
        raise BadInput(
            f"shards {', '.join(missing)} of this profile are in none of the stores: profile them "
            "first"
        )
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
        """The values that all shards of one profile share, wherever each was made."""
        own = ("index", "device", "threads")
        shared = {
            name: value for name, value in self.run.info.parameters.items() if name not in own
        }
        return self.model.fingerprint, self.run.info.data_digest, tuple(sorted(shared.items()))


def _shards(path: Path) -> list[_Shard]:
    with Store.open(path, read_only=True) as store:
        models = {model.model_id: model for model in store.models()}
        return [_shard(store, run, models[run.info.model_id]) for run in store.runs(command=SHARD)]


def _shard(store: Store, run: StoredRun, model: ModelInfo) -> _Shard:
    trace = store.read("traces", run.run_id) if "traces" in run.contents else None
    similarity = None
    if "similarity" in run.contents:
        size = (model.shape.num_layers, model.shape.num_experts)
        similarity = similarity_matrices(store.read("similarity", run.run_id), *size)
    return _Shard(run, model, stored(store, run.run_id, model.shape), trace, similarity)
