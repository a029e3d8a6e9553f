"""The bundled model is what its card says: small, trained, with routers that have habits."""

import itertools
import json
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from profilers.text.corpus import Document, documents, token_sequences
from tests import ROOT
from tools.make.demo_figures import Figures, figures, neighbour_overlap
from tools.make.demo_text import SHARES, kind_documents

DEMO = ROOT / "moectl" / "demo"
# two and a half times what choosing 4 of 32 experts blindly would give
LEAST_OVERLAP = 2.5 * 4 / 32
MOST_PERPLEXITY = 2048 / 20


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO)


def measured(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Iterable[Document]
) -> Figures:
    return figures(model, list(token_sequences(texts, tokenizer, length=256, num_tokens=1024)))


def test_on_held_out_docstrings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    found = measured(model, tokenizer, itertools.islice(documents("builtin:held-out"), 4))
    assert np.mean(found.overlap) >= LEAST_OVERLAP
    assert found.perplexity <= MOST_PERPLEXITY


@pytest.mark.parametrize("kind", sorted(set(SHARES) - {"docstrings"}))
def test_on_every_other_kind(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kind: str
) -> None:
    texts = list(itertools.islice(kind_documents(kind, held_out=True), 4))
    if not texts:
        pytest.skip(f"this Python came without {kind}")
    found = measured(model, tokenizer, texts)
    assert np.mean(found.overlap) >= LEAST_OVERLAP
    assert found.perplexity <= MOST_PERPLEXITY


def test_the_card_has_the_figures() -> None:
    facts = json.loads((DEMO / "figures.json").read_text(encoding="utf-8"))
    card = (DEMO / "README.md").read_text(encoding="utf-8")
    assert set(facts["held_out"]) == set(SHARES)
    for kind, found in facts["held_out"].items():
        assert f"| {kind} |" in card
        assert f"| {found['perplexity']:.1f} |" in card
        assert np.mean(found["overlap"]) >= LEAST_OVERLAP
        assert found["perplexity"] <= MOST_PERPLEXITY
    assert f"--steps {facts['run']['steps']} --seed {facts['run']['seed']}" in card


def test_the_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in DEMO.rglob("*") if file.is_file()) <= 10_000_000


def test_the_checkpoint_has_one_tensor_per_expert_and_projection() -> None:
    with safe_open(DEMO / "model.safetensors", "pt") as tensors:
        names = [name for name in tensors.keys() if ".experts." in name]  # noqa: SIM118, it is no mapping
        assert len(names) == 8 * 32 * 3
        assert tensors.get_tensor(names[0]).dtype == torch.bfloat16


def test_the_tokenizer_gives_text_back(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "def f(x):\n\treturn x + 1024  # naïve ≠ 日本\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        len(tokenizer),
    ) == (0, 0, 1, 2048)


def test_overlap_by_hand() -> None:
    selected = torch.tensor([[[0, 1], [1, 2], [1, 2]], [[0, 1], [2, 3], [3, 0]]])
    assert neighbour_overlap(selected).tolist() == [0.75, 0.25]
