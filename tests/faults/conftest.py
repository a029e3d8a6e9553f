"""A store with one run, for whatever is to be done to it."""

from pathlib import Path

import pytest

from tests.stores import write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "moe.duckdb"


@pytest.fixture
def filled(path: Path) -> Path:
    write(path)
    return path
