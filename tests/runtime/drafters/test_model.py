"""Drafts by a small checkpoint: its own greedy continuation, whatever was rejected before."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from artifacts.errors import BadInput, BadUsage
from runtime.drafters import greedy
from runtime.drafters.model import SmallModel
from runtime.model.open import MoeModel
from tests.conftest import Checkpoint
from tests.helpers.families import COMMON, VOCABULARY, character_tokenizer


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense checkpoint with the tokenizer of the others."""
    folder = tmp_path_factory.mktemp("dense")
    torch.manual_seed(1)
    Qwen3ForCausalLM(Qwen3Config(**COMMON)).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["dense", "olmoe", "gpt_oss"])
def test_drafts_do_not_depend_on_what_was_drafted_before(
    checkpoint: Checkpoint,
    dense: Path,
    opened: MoeModel,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    monkeypatch.setattr(greedy, "SURE", 0.0)
    folder = dense if family == "dense" else checkpoint(family)
    kind = SmallModel.open(opened, str(folder))
    random = np.random.default_rng(0)
    tokens = random.integers(3, VOCABULARY, 9).tolist()
    drafter = kind.begin(tokens, None)
    tokens.append(5)
    for num_right in (0, 1, 3, 2, 0, 3):
        drafts = drafter.propose(tokens, 3)
        assert drafts == kind.begin(tokens, None).propose(tokens, 3)
        tokens += [*drafts[:num_right], int(random.integers(3, VOCABULARY))]
    held = sum(each.stat().st_size for each in folder.glob("*.safetensors"))
    assert 0.9 * held < kind.receipt()["bytes"] <= held
    assert kind.receipt()["kv_bytes"]
    drafter.close()


def test_a_model_that_is_not_sure_drafts_nothing(opened: MoeModel, dense: Path) -> None:
    assert SmallModel.open(opened, str(dense)).begin([5, 6], None).propose([5, 6, 7], 4) == []


def test_another_tokenizer_is_refused(opened: MoeModel) -> None:
    with pytest.raises(BadInput, match="another tokenizer than the model.*--draft ngram"):
        SmallModel.open(opened, str(Path("moectl/demo").resolve()))


def test_a_path_is_asked_for(opened: MoeModel) -> None:
    with pytest.raises(BadUsage, match="model=PATH"):
        SmallModel.open(opened, None)
