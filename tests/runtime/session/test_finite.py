"""Numbers that are not finite end a request with the layer and expert that gave the first, however it is answered."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.session.batch import RequestBatch
from runtime.session.finite import NotFinite
from runtime.session.generate import Sampling
from runtime.session.interleave import Interleave
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint

PROMPT = torch.tensor([[5, 6, 7, 8]])
NAMED = r"^layer 1, expert \d+ is the first to give NaN or infinity: .* too large for float32 "


@pytest.fixture(scope="module")
def overflowing(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with finite weights, of which the products in layer 1's experts overflow."""
    folder = tmp_path_factory.mktemp("overflowing") / "model"
    shutil.copytree(checkpoint("olmoe"), folder)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name in tensors:
        if ".layers.1.mlp.experts." in name and "down_proj" not in name:
            tensors[name] *= 1e30
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("experts", ["exact", "fused"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_way_to_answer_names_the_first_expert(overflowing: Path, experts: str, temperature: float) -> None:
    sampling = Sampling(max_new_tokens=3, temperature=temperature)
    with Session.open(overflowing, Settings(budget="50%", experts=experts)) as session:
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
