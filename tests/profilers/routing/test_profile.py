"""Profiles in the store: reading them back, merging shards, and continuing one that was stopped."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from artifacts.errors import BadInput, Partly
from artifacts.store.rows import similarity_matrices
from artifacts.store.runs import ModelInfo
from artifacts.store.store import Store
from profilers.routing import profile as profiling
from profilers.routing.distribute import Counted, Counting, parts
from profilers.routing.observe import RoutingForesight
from profilers.routing.profile import Profiled, profile_routing
from profilers.routing.shards import merge_shards
from profilers.routing.tables import stored
from profilers.text.batches import Batching, Data
from profilers.text.corpus import data_digest
from profilers.workers.workers import Processes
from runtime.model.layout import ExpertStore
from runtime.model.open import MoeModel
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint
from tests.helpers.families import VOCABULARY

pytestmark = pytest.mark.slow

BATCHING = Batching(batch=2, length=10, prefill=4)
LENGTHS = (10, 7, 10, 10, 3, 10, 8, 10, 10, 5, 10)
DATA = Data(
    "a test",
    [np.random.default_rng(at).integers(3, VOCABULARY, n) for at, n in enumerate(LENGTHS)],
    seed=3,
)
TABLES = ("activations", "coactivations", "entropy", "traces")


def info(opened: MoeModel) -> ModelInfo:
    return ModelInfo("a model", opened.fingerprint, opened.family, opened.shape)


def profile(
    opened: MoeModel,
    path: Path,
    *,
    batching: Batching = BATCHING,
    data: Data = DATA,
    trace: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profiled:
    with Session(opened, Settings(budget="25%")) as session:
        return profile_routing(
            session,
            data,
            batching,
            model=info(opened),
            store_path=path,
            keep_trace=RoutingForesight() if trace else None,
            progress=progress,
        )


def rows(path: Path, run_id: int, tables: tuple[str, ...] = TABLES) -> dict[str, pa.Table]:
    with Store.open(path, read_only=True) as store:
        return {table: store.read(table, run_id) for table in tables}


@pytest.fixture(scope="module")
def whole(opened: MoeModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pa.Table]:
    """Every row of the whole profile, counted in one run."""
    path = tmp_path_factory.mktemp("whole") / "moe.duckdb"
    return rows(path, profile(opened, path).run_id)


def test_a_profile_comes_back_as_it_was(opened: MoeModel, tmp_path: Path) -> None:
    path = tmp_path / "moe.duckdb"
    heard: list[tuple[int, int]] = []
    done = profile(opened, path, progress=lambda *so_far: heard.append(so_far))
    with Store.open(path, read_only=True) as store:
        again = stored(store, done.run_id, opened.shape)
        run = store.run(done.run_id)
        assert store.latest_run("profile", info(opened).model_id) == run
    ours = done.profile.arrays()
    theirs = again.arrays()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert (run.info.tokens, run.info.seed, run.info.data) == (sum(LENGTHS), 3, "a test")
    assert run.info.data_digest == data_digest(DATA.sequences)
    whole = {"batch": 2, "length": 10, "prefill": 4, "index": 0, "count": 1}
    whole |= {
        "device": "cpu",
        "dtype": str(opened.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }
    assert run.info.parameters == whole | {"trace": True, "distance": 1, "learned": 0, "samples": 0}
    assert heard[-1] == (sum(LENGTHS), sum(LENGTHS)) and len(heard) == 6
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_trace_none_is_kept(
    opened: MoeModel, tmp_path: Path, whole: dict[str, pa.Table]
) -> None:
    path = tmp_path / "moe.duckdb"
    counted = rows(path, profile(opened, path, trace=False).run_id, TABLES[:-1])
    assert all(counted[table].equals(whole[table]) for table in counted)
    with pytest.raises(BadInput, match="wrote no traces"):
        rows(path, 1)


def test_shards_measure_similarity_together(opened: MoeModel, tmp_path: Path) -> None:
    """The shards are small enough to measure all their tokens, so the merged means are those of the
    whole."""

    def measured(path: Path, batching: Batching) -> Profiled:
        with Session(opened, Settings(budget="25%")) as session:
            done = profile_routing(
                session, DATA, batching, model=info(opened), store_path=path, num_samples=1000
            )
            assert session.forward(torch.zeros(1, 4, dtype=torch.int64)).logits.isfinite().all()
        return done

    whole, parts, into = (tmp_path / f"{name}.duckdb" for name in ("whole", "parts", "merged"))
    measured(whole, BATCHING)
    for index in range(3):
        measured(parts, replace(BATCHING, index=index, count=3))
    merge_shards([parts], into=into)
    size = (opened.shape.num_layers, opened.shape.num_experts)
    tables = (rows(path, 1, ("similarity",))["similarity"] for path in (into, whole))
    merged, expected = (similarity_matrices(table, *size) for table in tables)
    assert merged.samples.sum() == sum(LENGTHS) * opened.shape.top_k * opened.shape.num_layers
    for name in ("cosine", "loss", "left_out", "samples"):
        assert np.allclose(getattr(merged, name), getattr(expected, name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_shards_in_any_order_are_the_whole(
    order: tuple[int, ...], opened: MoeModel, tmp_path: Path, whole: dict[str, pa.Table]
) -> None:
    """Shards 1 and 3 share a store, as two runs on one machine would."""
    paths = [tmp_path / name for name in ("first.duckdb", "second.duckdb", "first.duckdb")]
    for index in order:
        profile(opened, paths[index], batching=replace(BATCHING, index=index, count=3))
    merged = merge_shards(
        [paths[index] for index in order], into=(path := tmp_path / "merged.duckdb")
    )
    found = rows(path, merged.run_id)
    assert all(found[table].equals(whole[table]) for table in TABLES)
    assert merged.num_tokens == sum(LENGTHS)
    with Store.open(path, read_only=True) as store:
        run = store.latest_run("profile", info(opened).model_id)
    assert run.run_id == merged.run_id and run.info.parameters["shards"] == 3


def test_shards_that_do_not_make_a_whole_are_refused(opened: MoeModel, tmp_path: Path) -> None:
    path = tmp_path / "moe.duckdb"
    into = tmp_path / "merged.duckdb"
    profile(opened, path)
    with pytest.raises(BadInput, match="no profile shards"):
        merge_shards([path], into=into)
    for index, prefill in ((0, 4), (1, 4), (2, 5)):
        profile(opened, path, batching=replace(BATCHING, index=index, count=3, prefill=prefill))
    with pytest.raises(BadInput, match="shards 1/3, 2/3 of this profile are in none of the stores"):
        merge_shards([path], into=into)
    assert not into.exists()


class Poisoned(Counting):
    """Batch 2 always kills its worker."""

    def __call__(self, task: tuple) -> Counted:
        if 2 in task[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(task)


def test_processes_count_the_same_rows(
    checkpoint: Checkpoint,
    opened: MoeModel,
    tmp_path: Path,
    whole: dict[str, pa.Table],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processes are forked to save a second of imports; a batch that cannot be counted does not
    affect the others."""
    monkeypatch.setattr(
        "profilers.workers.workers.get_context", lambda _: multiprocessing.get_context("fork")
    )
    path = tmp_path / "moe.duckdb"
    model = replace(info(opened), name=str(checkpoint("olmoe")))

    def divided() -> Profiled:
        with Session(opened, Settings(budget="25%", threads=1)) as session:
            known = {
                "model": model,
                "store_path": path,
                "keep_trace": RoutingForesight(),
                "executor": Processes(2),
            }
            return profile_routing(session, DATA, BATCHING, **known)

    with (
        monkeypatch.context() as broken,
        pytest.raises(Partly, match="1 of 6 batches .* could not be counted: 3;"),
    ):
        broken.setattr(profiling, "Counting", Poisoned)
        divided()
    assert not path.exists()
    done = divided()
    assert done.resumed == 5 and done.num_tokens == sum(LENGTHS)
    found = rows(path, done.run_id)
    assert all(found[table].equals(whole[table]) for table in TABLES)
    assert list(tmp_path.iterdir()) == [path]


def test_tasks_are_several_batches_where_they_are_many() -> None:
    for num_batches, size in ((5, 1), (80, 10), (10_000, 64)):
        found = parts(range(3, 3 + num_batches), Processes(2), is_traced=False)
        assert [at for part in found for at in part] == list(range(3, 3 + num_batches))
        assert {len(part) for part in found[:-1]} == {size}
    assert {len(part) for part in parts(range(80), Processes(2), is_traced=True)} == {1}


class FailingStore(ExpertStore):
    """A store that fails after `num_reads` experts."""

    def __init__(self, opened: MoeModel, num_reads: int) -> None:
        self._store = opened.store
        self.layout = opened.store.layout
        self.shape = opened.shape
        self._left = num_reads

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None:
        self._left -= 1
        if self._left < 0:
            raise BadInput("the disk is gone")
        self._store.read(layer, expert, out)

    def check_unchanged(self) -> None:
        self._store.check_unchanged()


@pytest.mark.parametrize("num_reads", [3, 20, 40, 60])
def test_what_was_stopped_goes_on_and_ends_alike(
    num_reads: int,
    opened: MoeModel,
    tmp_path: Path,
    whole: dict[str, pa.Table],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The profile stops in the middle of a batch, some layers of which have been counted."""
    monkeypatch.setattr(profiling, "_KEEP_EVERY_S", 0)
    path = tmp_path / "moe.duckdb"
    with pytest.raises(BadInput, match="disk is gone"):
        profile(replace(opened, store=FailingStore(opened, num_reads)), path)
    assert not path.exists()
    done = profile(opened, path)
    found = rows(path, done.run_id)
    assert all(found[table].equals(whole[table]) for table in TABLES)
    assert (done.resumed > 0) == (num_reads >= 20)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "change",
    [
        {"batching": replace(BATCHING, prefill=5)},
        {"batching": replace(BATCHING, count=2)},
        {"data": replace(DATA, sequences=DATA.sequences[:-1])},
        {"trace": False},
    ],
)
def test_only_the_same_profile_goes_on(
    change: dict[str, object], opened: MoeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "_KEEP_EVERY_S", 0)
    path = tmp_path / "moe.duckdb"
    with pytest.raises(BadInput, match="disk is gone"):
        profile(replace(opened, store=FailingStore(opened, 40)), path)
    assert profile(opened, path, **change).resumed == 0
    assert profile(opened, path).resumed > 0
