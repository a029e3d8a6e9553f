"""Cosines and losses equal those of an independent computation on the plain model."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from artifacts.errors import BadUsage
from artifacts.routing.similarity import Similarity
from profilers.routing import similarity as measuring
from profilers.routing.similarity import measure_similarity
from runtime.model.open import MoeModel, open_model
from tests.conftest import Checkpoint
from tests.helpers.families import VOCABULARY

SEQUENCES = [
    np.random.default_rng(at).integers(3, VOCABULARY, length)
    for at, length in enumerate((9, 12, 5, 12, 3))
]
NUM_TOKENS = sum(map(len, SEQUENCES))
NAMES = ("cosine", "loss", "left_out", "samples")


def by_hand(opened: MoeModel, folder: str) -> list[tuple[np.ndarray, ...]]:
    """Return each layer's values from the plain model's experts module, called with one expert
    selected at a time."""
    plain = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    found = []
    for layer in opened.layers:
        experts = plain.get_submodule(layer.name)
        heard: list[tuple[torch.Tensor, ...]] = []
        handle = experts.register_forward_pre_hook(
            lambda module, args, heard=heard: heard.append(args)
        )
        with torch.inference_mode():
            for sequence in SEQUENCES:
                plain(input_ids=torch.from_numpy(sequence)[None])
            handle.remove()
            found.append(_layer(experts, *(torch.cat(parts) for parts in zip(*heard, strict=True))))
    return found


def _layer(
    experts: nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[np.ndarray, ...]:
    num_experts = next(experts.parameters()).shape[0]
    alone = [
        experts(x, torch.full((len(x), 1), i), torch.ones(len(x), 1)).double()
        for i in range(num_experts)
    ]
    cosine = np.zeros((num_experts, num_experts))
    loss = np.zeros((num_experts, num_experts))
    left_out = np.zeros(num_experts)
    samples = np.zeros(num_experts, int)
    any_rank = weights.double().square().mean().sqrt()
    for i in range(num_experts):
        served = [
            (t, weights[t, ids[t] == i].double()) for t in range(len(x)) if (ids[t] == i).any()
        ]
        samples[i] = len(served)
        served = served or [(t, any_rank) for t in range(len(x))]
        left_out[i] = np.mean([float((w * alone[i][t]).square().mean()) for t, w in served])
        for j in range(num_experts):
            cosine[i, j] = torch.cosine_similarity(alone[i], alone[j], dim=1).mean()
            loss[i, j] = np.mean(
                [float((w * alone[j][t] - w * alone[i][t]).square().mean()) for t, w in served]
            )
    return cosine, loss, left_out, samples


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss", "deepseek_v2"])
def test_against_the_plain_model(
    family: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    # small, so that outputs come in several parts
    monkeypatch.setattr(measuring, "_OUTPUT_NBYTES", 20_000)
    monkeypatch.setattr(measuring, "_BLOCK_NBYTES", 9_000)
    folder = str(checkpoint(family))
    opened = open_model(folder)
    found = measure_similarity(opened, SEQUENCES, num_samples=NUM_TOKENS, batch=2)
    for layer, expected in enumerate(by_hand(opened, folder)):
        for name, values in zip(NAMES, expected, strict=True):
            assert getattr(found, name)[layer] == pytest.approx(values, rel=1e-5, abs=1e-7), name
    opened.store.close()


def test_experts_without_tokens_borrow_the_sample(opened: MoeModel) -> None:
    found = measure_similarity(opened, SEQUENCES, num_samples=1)
    assert (found.samples.sum(axis=1) == opened.shape.top_k).all()
    is_alone = found.samples == 0
    assert is_alone.any() and (found.left_out > 0).all()
    off = ~np.eye(opened.shape.num_experts, dtype=bool)
    assert (found.loss[:, off] > 0).all()


def test_the_seed_decides_the_sample(opened: MoeModel) -> None:
    def sample(seed: int) -> Similarity:
        return measure_similarity(opened, SEQUENCES, num_samples=6, batch=2, seed=seed)

    first = sample(0)
    again = sample(0)
    other = sample(1)
    assert all(np.array_equal(getattr(first, name), getattr(again, name)) for name in NAMES)
    assert not np.array_equal(first.loss, other.loss)
    assert (first.samples.sum(axis=1) == 6 * opened.shape.top_k).all()


def test_the_model_is_given_back(opened: MoeModel) -> None:
    measure_similarity(opened, SEQUENCES, num_samples=3)
    assert not any(hasattr(layer.experts, "moectl_forward") for layer in opened.layers)
    assert opened.model.config._experts_implementation == "eager"


def test_no_samples_are_refused(opened: MoeModel) -> None:
    with pytest.raises(BadUsage, match="at least one sample"):
        measure_similarity(opened, SEQUENCES, num_samples=0)
