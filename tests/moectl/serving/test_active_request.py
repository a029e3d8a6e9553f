"""Why an answer ended."""

import pytest
import torch

from moectl.serving.active_request import ActiveRequest
from moectl.serving.jobs import Done, Encoded, Event, GenerationJob, TextPiece
from moectl.serving.tally import Tally
from runtime.model.open import MoeModel
from runtime.session.generation.round_robin import RoundRobin
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session
from tests.helpers.serving import SETTINGS


def answered(session: Session, num_tokens: int) -> tuple[str, Done]:
    told: list[Event] = []
    ids = torch.tensor([[5, 9, 2, 14]])
    sampling = Sampling(num_tokens)
    job = GenerationJob(ids, num_tokens, sampling, (), told.append, encoded=Encoded(ids, sampling))
    request = ActiveRequest(
        job, session.opened, Tally(session.opened.shape.num_layers), preset="on-demand"
    )
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
