"""The maps that a run learns are written whole or not at all, also when other processes write and
when it is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from artifacts.errors import BadUsage, OutOfResources
from artifacts.routing.expert_maps import ExpertMaps
from artifacts.store import database
from artifacts.store.expert_maps import COMMAND, LEARN, TABLE, map_rows, stored_maps
from artifacts.store.runs import RunInfo, utc_now
from artifacts.store.store import Store
from moectl.commands.start.run import keeping_maps
from runtime.policies.shared.maps import LearnedMaps
from runtime.session.generation.sampling import Sampling
from runtime.session.learn_maps import WrittenMaps
from runtime.session.session import Session
from runtime.session.settings import Settings
from tests import ROOT
from tests.conftest import Checkpoint
from tests.helpers.learned import CAPACITY, MODEL, keep, learned, maps_of, read

pytestmark = pytest.mark.slow


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """Three maps of `moectl build-maps`, run 1."""
    path = tmp_path / "moe.duckdb"
    parameters = {"capacity": CAPACITY, "distance": 1, "dtype": "float32"}
    with Store.open(path) as store:
        store.add_model(MODEL)
        rows = map_rows(maps_of(0, 3), np.array([[0, 0], [0, 1], [4, 0]]))
        store.write_run(
            RunInfo(COMMAND, MODEL.model_id, utc_now(), 1.0, parameters=parameters), {TABLE: rows}
        )
    return path


def holds(maps: ExpertMaps, others: ExpertMaps, rows: slice) -> bool:
    """Whether those rows of `others` are among the maps, to the bit."""
    held = {row.tobytes() for row in np.ascontiguousarray(maps.probabilities)}
    return all(row.tobytes() in held for row in np.ascontiguousarray(others.probabilities[rows]))


def test_the_next_run_begins_with_the_learned_maps(built: Path) -> None:
    first = learned(1, 2, read(built)[0])
    assert keep(built, first, 1) == WrittenMaps(2, num_maps=5, num_iterations=2, others=None)
    maps, origins, runs = read(built)
    assert np.array_equal(maps.probabilities, first.maps.probabilities)
    assert origins.tolist() == [[0, 0], [0, 1], [4, 0], [5, 0], [5, 1]], "requests are numbered on"
    assert runs == [(1, COMMAND), (2, LEARN)]
    keep(built, learned(2, 1, maps), 2)
    maps, _, runs = read(built)
    assert (len(maps), runs) == (6, [(1, COMMAND), (3, LEARN)]), (
        "run 3 replaces run 2, and the built maps stay"
    )
    assert keep(built, LearnedMaps(maps, *np.zeros((2, 0), np.int64), 0), 3) is None


def test_of_two_runs_on_one_store_neither_is_lost(built: Path) -> None:
    base = read(built)[0]
    mine = learned(1, 2, base)
    other = learned(2, 2, base)
    keep(built, other, 1)
    assert keep(built, mine, 1) == WrittenMaps(3, num_maps=7, num_iterations=2, others=2)
    maps, origins, _ = read(built)
    assert (
        holds(maps, mine.maps, slice(3, 5))
        and holds(maps, other.maps, slice(3, 5))
        and holds(maps, base, slice(3))
    )
    assert origins[3:].tolist() == [[5, 0], [5, 1], [6, 0], [6, 1]]


def test_a_full_store_of_maps_stays_as_large(built: Path) -> None:
    keep(built, learned(1, 5, read(built)[0]), 1)
    full = read(built)[0]
    newcomer = learned(2, 1)
    assert keep(built, newcomer, None).num_maps == CAPACITY
    assert holds(read(built)[0], newcomer.maps, slice(1)) and not holds(
        read(built)[0], full, slice(CAPACITY)
    )


def spawn(code: str, *arguments: object) -> subprocess.Popen:
    code = f"import os, signal, sys, time\nfrom tests.helpers.learned import *\n{code}"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ)


HOLD = (
    "connection = Store.open(sys.argv[1])\nprint('open', flush=True)\n"
    "time.sleep(float(sys.argv[2]))\nos._exit(0)"
)


def test_a_store_in_use_is_waited_for_and_then_named(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = learned(1, 1, read(built)[0])
    holder = spawn(HOLD, built, 0.5)
    assert holder.stdout.readline() == "open\n"
    assert keep(built, mine, 1).run_id == 2
    holder.wait()
    base = read(built)[0]
    holder = spawn(HOLD, built, 30)
    monkeypatch.setattr(database, "PATIENCE_S", 0.3)
    try:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(
            OutOfResources, match=f"in use by process {holder.pid}; wait until it ends"
        ):
            keep(built, learned(2, 1), 2)
    finally:
        holder.kill()
        holder.wait()
    assert np.array_equal(read(built)[0].probabilities, base.probabilities)


FOREVER = """
path, run_id = Path(sys.argv[1]), 1
for seed in range(10_000):
    run_id = keep(path, learned(seed, 1, read(path)[0]), run_id).run_id
    print(run_id, flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_a_kill_loses_only_what_was_not_committed(built: Path, delay_s: float) -> None:
    writer = spawn(FOREVER, built)
    said = [int(writer.stdout.readline()) for _ in range(2)]
    time.sleep(delay_s)
    writer.send_signal(signal.SIGKILL)
    said += map(int, writer.stdout.read().split())
    writer.wait()
    maps, _, runs = read(built)
    assert runs[0] == (1, COMMAND) and len(runs) == 2, "one learned run, whole"
    assert runs[1][0] in (said[-1], said[-1] + 1) and len(maps) == min(CAPACITY, 3 + runs[1][0] - 1)


FULL = """
import resource
from artifacts.errors import Problem
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
large = ExpertMaps(9000, num_layers=2, num_experts=4, hidden=HIDDEN, distance=1)
many = LearnedMaps(maps_of(1, 9000, large), np.arange(9000), np.zeros((9000, 2)), 9000)
limit = Path(sys.argv[1]).stat().st_size + 200_000
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    keep(Path(sys.argv[1]), many, 1)
except Problem as error:
    print(type(error).__name__, error, flush=True)
os._exit(0)
"""


def test_a_full_disk_leaves_the_store_unchanged(built: Path) -> None:
    base = read(built)[0]
    said, _ = spawn(FULL, built).communicate()
    assert said.startswith("OutOfResources no space left") and said.count("\n") == 1
    with Store.open(built, read_only=True) as store:
        assert np.array_equal(stored_maps(store, run_id=1).probabilities, base.probabilities)
    assert len(read(built)[0]) in (3, 9000), (
        "whole or not at all: it may have been committed before the disk was full"
    )


def generated(session: Session, count: int) -> None:
    list(session.tokens(torch.arange(3, 9)[None], Sampling(count, ignore_eos=True)))


def test_a_run_that_is_stopped_writes_its_whole_iterations(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """It begins without maps; the second run loads those of the first, and adds its own."""
    name = str(checkpoint("olmoe"))
    path = tmp_path / "moe.duckdb"
    settings = Settings(
        preset="fmoe", learn=True, budget="50%", link="1GB/s", window="5KiB", device="cpu"
    )
    with (
        pytest.raises(KeyboardInterrupt),
        Session.open(name, settings) as session,
        keeping_maps(session, name, store=path),
    ):
        generated(session, 4)
        num_steps = session.controller.now.step
        session.watcher.on_step = lambda step: stop() if step.layer else None
        generated(session, 1)
    assert session.controller.now.step == num_steps + 1, "stopped within a pass"
    with Store.open(path, read_only=True) as store:
        assert len(stored_maps(store)) == 4
    with (
        Session.open(name, settings, store=path) as session,
        keeping_maps(session, name, store=path),
    ):
        assert (
            session.receipt()["maps"] | {"held": 4, "capacity": 1000, "learned_iterations": 0}
            == (session.receipt()["maps"])
        )
        generated(session, 3)
        assert session.controller.counters.totals()["prefetches"] > 0
    with Store.open(path, read_only=True) as store:
        assert len(stored_maps(store)) == 7 and len(store.runs()) == 1


def test_a_run_that_holds_every_expert_learns_too(checkpoint: Checkpoint) -> None:
    settings = Settings(
        preset="fmoe", policies={"prefetch": "none"}, learn=True, budget="100%", device="cpu"
    )
    with Session.open(str(checkpoint("olmoe")), settings) as session:
        generated(session, 5)
        assert session.parts.policies.matching.learned().num_iterations == 5


def stop() -> None:
    raise KeyboardInterrupt


def test_learning_is_for_policies_that_use_maps() -> None:
    with pytest.raises(BadUsage, match="no policy chosen here uses any: give --preset fmoe"):
        Settings(preset="specmd", learn=True)
