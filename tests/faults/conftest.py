"""A store with one run, and copies of checkpoints, for tests that damage them."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import Checkpoint
from tests.faults.models import Copy
from tests.helpers.stores import write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "moe.duckdb"


@pytest.fixture
def filled(path: Path) -> Path:
    write(path)
    return path


@pytest.fixture
def copy(checkpoint: Checkpoint, tmp_path: Path) -> Copy:
    """A private copy of a checkpoint."""
    return lambda *which: shutil.copytree(checkpoint(*which), tmp_path / "model")
