"""A pass that gives no numbers is told to the client that asked for it, and the server stays up."""

from pathlib import Path

import httpx2
import openai
import pytest

from moectl.serving.guard import ServerLimits
from runtime.model.open import open_model
from tests.conftest import Checkpoint
from tests.helpers.overflowing import overflowing
from tests.helpers.serving import EXACT, SETTINGS, serving


@pytest.mark.parametrize("shares_passes", [False, True])
def test_numbers_that_are_not_finite_are_an_error_of_the_server(
    shares_passes: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    opened = open_model(str(overflowing(checkpoint("olmoe"), tmp_path / "model")))
    limits = ServerLimits(num_rows=2, shares_passes=shares_passes)
    with serving(opened, SETTINGS, limits, tmp_path / "none.duckdb") as running:
        for stream in (False, True):
            asked = EXACT | {"prompt": "sheep", "max_tokens": 4, "stream": stream}
            with pytest.raises(openai.APIError, match=r"layer 1, expert \d+ is the first"):
                list(running.client().completions.create(**asked))
        assert httpx2.get(f"{running.url}/health").json() == {"status": "ok"}
