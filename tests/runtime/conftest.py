"""A small OLMoE that is opened once a module, and a session of it on virtual time."""

from collections.abc import Iterator

import pytest

from runtime.links import emulated
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint
from tests.helpers.clock import VirtualClock


@pytest.fixture(scope="module")
def opened(checkpoint: Checkpoint) -> Iterator[MoeModel]:
    opened = open_model(str(checkpoint("olmoe")))
    yield opened
    opened.store.close()


@pytest.fixture
def session(opened: MoeModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A link of 1 MB/s and half of the experts. Computing takes no time: every load is waited for
    as a whole."""
    monkeypatch.setattr(emulated, "WallClock", VirtualClock)
    with Session(opened, Settings(budget="50%", link="1MB/s")) as session:
        yield session
