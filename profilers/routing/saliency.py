"""Saliency of experts: REAP's score (Lasby et al., 2025), the mean over an expert's tokens of its
routing weight times the norm of its output."""

from collections.abc import Sequence

import numpy as np
import torch

from profilers.text.batches import check_sequences
from runtime.engine.one_expert import ExpertBuffer, OneExpertRunner, Routed
from runtime.model.arithmetic import assign, expert_forward, gather, weigh
from runtime.model.open import MoeModel


def saliency(opened: MoeModel, sequences: Sequence[np.ndarray], *, batch: int = 16) -> np.ndarray:
    """Return the scores [L, E] on `sequences` of equal length; an expert that no token selects has
    0. Raises BadInput for text that the model cannot read."""
    check_sequences(opened.model, sequences)
    shape = opened.shape
    sums = np.zeros((shape.num_layers, shape.num_experts))
    counts = np.zeros_like(sums)
    buffer = ExpertBuffer(opened)

    def count(routed: Routed) -> np.ndarray:
        layer = opened.layers[routed.layer]
        for expert, assigned in assign(routed.selected, routed.hidden.device).items():
            x = gather(routed.hidden, assigned)
            y = expert_forward(layer.experts, buffer.read(routed.layer, expert), x)
            norms = weigh(y, routed.weights, assigned).float().norm(dim=-1)
            sums[routed.layer, expert] += norms.double().sum().item()
            counts[routed.layer, expert] += len(norms)
        return routed.selected

    with OneExpertRunner(opened, count) as runner:
        for start in range(0, len(sequences), batch):
            runner.forward(torch.from_numpy(np.stack(sequences[start : start + batch])))
    return sums / np.maximum(counts, 1)


def least_salient(scores: np.ndarray, share: float) -> np.ndarray:
    """Return [L, E] bool, the `share` of each layer's experts with the lowest scores [L, E]."""
    num_pruned = round(share * scores.shape[1])
    return scores.argsort(axis=1, kind="stable").argsort(axis=1) < num_pruned
