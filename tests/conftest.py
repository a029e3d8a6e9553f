"""What every test may rely on: no network, one thread, and small checkpoints of each family made once per session."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub, which reads it once

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Checkpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Thread counts change rounding, and waiting for a second thread on a shared machine multiplies times."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """`checkpoint(family, layout="hub", dtype="float32")` gives a folder that tests must not write to."""
    made: dict[tuple[str, str, str], Path] = {}

    def make(family: str, layout: str = "hub", dtype: str = "float32") -> Path:
        import torch

        from tests import families

        key = (family, layout, dtype)
        if key not in made:
            folder = tmp_path_factory.mktemp("-".join(key))
            made[key] = families.save(family, layout, folder, getattr(torch, dtype))
        return made[key]

    return make
