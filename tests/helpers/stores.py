"""A small store for tests, and child processes that are killed or limited while they use it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from artifacts.shape import Shape
from artifacts.store.runs import ModelInfo, RunInfo, utc_now
from artifacts.store.store import Store
from tests import ROOT

MODEL = ModelInfo(
    "demo", "a" * 64, "olmoe", Shape(num_layers=2, num_experts=4, top_k=2, expert_nbytes=100)
)


def run_info(command: str = "profile", model_id: str | None = MODEL.model_id) -> RunInfo:
    return RunInfo(
        command,
        model_id,
        utc_now(),
        1.5,
        data="builtin",
        tokens=7,
        seed=3,
        parameters={"alpha": [0.5]},
        versions={},
    )


def activations(num_rows: int, seed: int = 0) -> pa.Table:
    random = np.random.default_rng(seed)
    return pa.table(
        {
            "phase": ["prefill"] * num_rows,
            "layer": (np.arange(num_rows) // 256).astype(np.uint16),
            "expert": (np.arange(num_rows) % 256).astype(np.uint16),
            "count": random.integers(0, 2**50, num_rows),
            "weight": random.random(num_rows),
        }
    )


def write(path: Path, num_rows: int = 20_000, command: str = "profile") -> int:
    """Write one more run."""
    with Store.open(path) as store:
        store.add_model(MODEL)
        return store.write_run(run_info(command), {"activations": activations(num_rows)})


def verified(path: Path) -> list[int]:
    """The ids of all complete runs, each with every row it wrote."""
    with Store.open(path, read_only=True) as store:
        for run in store.runs():
            for table in run.contents:
                store.read(table, run.run_id)
        return [run.run_id for run in store.runs()]


def forked(work: Callable[[], object]) -> int:
    """What a copy of this process ends with that does the work; negative: the signal that ended it.

    For processes of `spawn` only: a copy of one with threads may hang.
    """
    if (pid := os.fork()) == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def said_by(code: str, *arguments: object) -> str:
    """What a child process prints that runs to its end."""
    process = spawn(code, *arguments)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, process.returncode
    return said


def spawn(code: str, *arguments: object) -> subprocess.Popen:
    """A child process that can import this file and the packages it tests."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-c",
        "from tests.helpers.stores import *\n" + code,
        *map(str, arguments),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def traces(num_rows):
    return pa.table(
        {
            "request": [0] * num_rows,
            "pass": [0] * num_rows,
            "phase": pa.array(["decode"] * num_rows).dictionary_encode(),
            "layer": [1] * num_rows,
            "token": [5] * num_rows,
            "experts": pa.array([[3, 1]] * num_rows, pa.list_(pa.uint16(), 2)),
            "weights": pa.array([[0.5, 0.25]] * num_rows, pa.list_(pa.float32(), 2)),
            "predicted": pa.array([[0.5, 0.5, 0.0]] * num_rows, pa.list_(pa.float32(), 3)),
        }
    )
