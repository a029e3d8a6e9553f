"""What every test may rely on: no network, one thread, no limit of time, no phase told because it
lasts, and small checkpoints of each family made once per session."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub, which reads it once
# Likewise before torch: another number of threads rounds differently, and threads that wait for
# each other only spin.
os.environ["OMP_NUM_THREADS"] = "1"
# The store of a test lies in the folder where the test stands. The user's is not touched.
os.environ["MOECTL_STORE"] = "moe.duckdb"
os.environ.update(XDG_DATA_HOME="/nowhere", XDG_CONFIG_HOME="/nowhere")
os.environ.pop("COLUMNS", None)  # of whoever starts the tests: tables to a pipe would be as wide

import gc
import signal

# as a shell starts what it runs in the background
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or no test could interrupt a process

from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.helpers.processors import as_processor

os.environ.update(as_processor(os.environ))  # before anything imports numba or computes with torch
gc.set_threshold(700, 10, 50)  # a full collection walks through all of torch and transformers

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

Checkpoint = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def untold_phases() -> Iterator[None]:
    """What a command prints does not depend on how busy the machine is: phases are not told because
    they last."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("moectl.shared.terminal.progress.WAIT_S", 600.0)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """`checkpoint(family, layout="hub", dtype="float32")` gives a folder that tests must not write
    to."""
    made: dict[tuple[str, str, str], Path] = {}

    def make(family: str, layout: str = "hub", dtype: str = "float32") -> Path:
        import torch

        from tests.helpers import families

        key = (family, layout, dtype)
        if key not in made:
            folder = tmp_path_factory.mktemp("-".join(key))
            made[key] = families.save(family, layout, folder, getattr(torch, dtype))
        return made[key]

    return make
