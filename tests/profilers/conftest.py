"""A small model that the tests of profilers share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.model.open import MoeModel, open_model
from tests.conftest import Checkpoint


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint) -> Path:
    return checkpoint("olmoe")


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[MoeModel]:
    model = open_model(str(folder))
    yield model
    model.store.close()
