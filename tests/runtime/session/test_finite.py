"""Numbers that are not finite end a request with the layer and expert that gave the first, however it is answered."""

from pathlib import Path

import pytest
import torch

from runtime.session.batch import RequestBatch
from runtime.session.finite import NotFinite
from runtime.session.generate import Sampling
from runtime.session.interleave import Interleave
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint
from tests.helpers.overflowing import overflowing

PROMPT = torch.tensor([[5, 6, 7, 8]])
NAMED = r"^layer 1, expert \d+ is the first to give NaN or infinity: .* too large for float32 "


@pytest.fixture(scope="module")
def too_large(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return overflowing(checkpoint("olmoe"), tmp_path_factory.mktemp("overflowing") / "model")


@pytest.mark.parametrize("experts", ["exact", "fused"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_way_to_answer_names_the_first_expert(too_large: Path, experts: str, temperature: float) -> None:
    sampling = Sampling(max_new_tokens=3, temperature=temperature)
    with Session.open(too_large, Settings(budget="50%", experts=experts)) as session:
        with pytest.raises(NotFinite, match=NAMED):
            list(session.generate(PROMPT, sampling))
        turns = Interleave(session)
        with pytest.raises(NotFinite, match=NAMED):
            turns.begin(PROMPT, sampling).step()
        turns.close()
        with RequestBatch(session) as batch:
            batch.add(PROMPT, sampling)
            [result] = batch.step()
            with pytest.raises(NotFinite, match=NAMED):
                raise result.error
            assert batch.is_idle


def test_numbers_that_are_finite_are_left_alone(checkpoint: Checkpoint) -> None:
    """A temperature that leaves one token, and options that leave none, are no fault of the weights."""
    with Session.open(checkpoint("olmoe"), Settings(budget="50%")) as session:
        plain = [token.token_id for token in session.generate(PROMPT, Sampling(max_new_tokens=3))]
        coldest = Sampling(max_new_tokens=3, temperature=1e-4)
        assert [token.token_id for token in session.generate(PROMPT, coldest)] == plain
