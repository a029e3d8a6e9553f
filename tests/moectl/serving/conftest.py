"""A running server of a small model, and its clients."""

from collections.abc import Iterator

import httpx2
import pytest
from openai import OpenAI

from moectl.serving.guard import ServerLimits
from runtime.model.open import MoeModel, open_model
from tests.conftest import Checkpoint
from tests.helpers.serving import SETTINGS, Running, serving

LIMITS = ServerLimits(num_rows=3, num_waiting=3, max_tokens=200, body_nbytes=20_000)


@pytest.fixture(scope="module")
def opened(checkpoint: Checkpoint) -> MoeModel:
    return open_model(str(checkpoint("olmoe")))


@pytest.fixture(scope="module")
def server(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    store = tmp_path_factory.mktemp("serve") / "moe.duckdb"
    with serving(open_model(str(checkpoint("olmoe"))), SETTINGS, LIMITS, store) as running:
        yield running


@pytest.fixture
def client(server: Running) -> OpenAI:
    return server.client()


@pytest.fixture
def web(server: Running) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, headers={"Authorization": "Bearer secret"}) as client:
        yield client
