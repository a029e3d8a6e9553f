"""A pass that gives no numbers is told to the client that asked for it, and the server stays up; why
an answer ended."""

from pathlib import Path

import httpx2
import openai
import pytest
import torch

from moectl.serving.guard import ServerLimits
from moectl.serving.jobs import Done, Encoded, Event, GenerationJob
from moectl.serving.running import ActiveRequest
from moectl.serving.tally import Tally
from runtime.model.open import MoeModel, open_model
from runtime.session.generation.round_robin import RoundRobin
from runtime.session.generation.sampling import Sampling
from runtime.session.replies.pieces import TextPiece
from runtime.session.session import Session
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


def answered(session: Session, num_tokens: int) -> tuple[str, Done]:
    told: list[Event] = []
    ids = torch.tensor([[5, 9, 2, 14]])
    sampling = Sampling(num_tokens)
    job = GenerationJob(ids, num_tokens, sampling, (), told.append, encoded=Encoded(ids, sampling))
    tally = Tally(session.opened.shape.num_layers)
    request = ActiveRequest(job, session, tally, preset="on-demand")
    with RoundRobin(session) as turns:
        turns.add(ids, sampling)
        while request.done is None:
            [result] = turns.step()
            request.take(result)
    return "".join(piece.text for piece in told if isinstance(piece, TextPiece)), request.done


def test_a_text_that_the_models_own_settings_end_was_stopped(
    opened: MoeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(opened, SETTINGS) as session:
        text, done = answered(session, 6)
        assert (done.reason, done.num_tokens) == ("length", 6)
        monkeypatch.setattr(opened.model.generation_config, "stop_strings", [text[2]])
        begun, done = answered(session, 6)
    assert text.startswith(begun) and (done.reason, done.num_tokens) == (
        "stop",
        text.index(text[2]) + 1,
    )
