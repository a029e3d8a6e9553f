"""Numbers that are not finite end a request with the layer and expert that gave the first, however
it is answered."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from profilers.compare import quality
from profilers.compare.likelihoods import likelihoods
from profilers.routing.observe import RoutingProfile, observe
from profilers.text.batches import Batch
from runtime.session.generation.batch import RequestBatch
from runtime.session.generation.finite import NotFinite
from runtime.session.generation.round_robin import RoundRobin
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint
from tests.helpers.overflowing import overflowing

PROMPT = torch.tensor([[5, 6, 7, 8]])
NAMED = r"^layer 1, expert \d+ is the first to give NaN or infinity: .* too large for float32\b"


@pytest.fixture(scope="module")
def too_large(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return overflowing(checkpoint("olmoe"), tmp_path_factory.mktemp("overflowing") / "model")


@pytest.mark.parametrize("experts", ["exact", "fused"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_way_to_answer_names_the_first_expert(
    too_large: Path, experts: str, temperature: float
) -> None:
    sampling = Sampling(max_new_tokens=3, temperature=temperature)
    with Session.open(too_large, Settings(budget="50%", experts=experts)) as session:
        with pytest.raises(NotFinite, match=NAMED):
            list(session.tokens(PROMPT, sampling))
        for way in (RoundRobin, RequestBatch):
            with way(session) as batch:
                batch.add(PROMPT, sampling)
                [result] = batch.step()
                with pytest.raises(NotFinite, match=NAMED):
                    raise result.error
                assert batch.is_idle


def test_numbers_that_the_checkpoint_asks_to_replace_are_replaced(
    too_large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As plain generate() does by `remove_invalid_values`."""
    with Session.open(too_large, Settings(budget="50%")) as session:
        monkeypatch.setattr(session.opened.model.generation_config, "remove_invalid_values", True)
        expected = [token.token_id for token in session.tokens(PROMPT, Sampling(3))]
        assert expected
        with RequestBatch(session) as batch:
            batch.add(PROMPT, Sampling(3))
            assert [batch.step()[0].token_id for _ in expected] == expected


def test_each_way_to_measure_names_the_first_expert(too_large: Path) -> None:
    text = [np.array([5, 6, 7, 8])]
    with Session.open(too_large, Settings(budget="50%")) as session:
        with pytest.raises(NotFinite, match=NAMED):
            quality.read(session, text, prefill=2)
        with pytest.raises(NotFinite, match=NAMED):
            likelihoods(session, [([5, 6, 7], [8])], rows=2)


def test_routers_that_cannot_choose_name_the_expert_before_them(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = overflowing(checkpoint("olmoe"), tmp_path / "model", layer=0)
    with Session.open(folder, Settings(budget="50%")) as session:
        profile = RoutingProfile(session.opened.shape.num_layers, session.opened.shape.num_experts)
        batch = Batch(0, (np.array([5, 6, 7, 8]),))
        with pytest.raises(NotFinite, match=r"^layer 0, expert \d+ is the first") as caught:
            list(observe(session, [batch], prefill=2, profile=profile))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value), "as workers send it"


def test_numbers_that_are_finite_are_left_alone(checkpoint: Checkpoint) -> None:
    """A temperature that leaves one token, and options that leave none, are no fault of the
    weights."""
    with Session.open(checkpoint("olmoe"), Settings(budget="50%")) as session:
        plain = [token.token_id for token in session.tokens(PROMPT, Sampling(max_new_tokens=3))]
        coldest = Sampling(max_new_tokens=3, temperature=1e-4)
        assert [token.token_id for token in session.tokens(PROMPT, coldest)] == plain
