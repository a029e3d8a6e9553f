"""Measures how well one expert replaces another, by computing every expert of a layer on a sample
of tokens.

Memory is bounded by the sample's inputs in every layer, the outputs of one layer's experts, and one
expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from artifacts.errors import BadUsage
from artifacts.routing.similarity import Similarity
from profilers.text.batches import check_sequences, padded, real_rows
from runtime.engine.one_expert import ExpertBuffer, OneExpertRunner, Routed
from runtime.model.arithmetic import expert_forward
from runtime.model.open import MoeModel

# sample from this many times as many tokens, because tokens of one sequence resemble each other
SPREAD = 4
# outputs of one layer's experts held at a time; for more tokens the experts are read again
_OUTPUT_NBYTES = 1 << 30
_BLOCK_NBYTES = 64 << 20  # outputs in float64 at a time


@dataclass(frozen=True, slots=True)
class Sampled:
    """One layer's sample: the inputs of its experts and the routing of n tokens."""

    hidden: torch.Tensor  # [n, H]
    selected: np.ndarray  # [n, K]
    weights: np.ndarray  # [n, K] float64, as the model applies them


def measure_similarity(
    opened: MoeModel,
    sequences: Sequence[np.ndarray],
    *,
    num_samples: int,
    batch: int = 16,
    seed: int = 0,
) -> Similarity:
    """Return cosines of experts' outputs and the losses of replacing one by another, on
    `num_samples` tokens drawn from `sequences` (all tokens if there are fewer)."""
    if num_samples < 1:
        raise BadUsage(f"similarity needs at least one sample, not {num_samples}")
    samples = sample_inputs(opened, sequences, num_samples=num_samples, batch=batch, seed=seed)
    return Similarity.stack(
        [
            layer_similarity(opened, index, samples.pop(0))
            for index in range(opened.shape.num_layers)
        ]
    )


def sample_inputs(
    opened: MoeModel, sequences: Sequence[np.ndarray], *, num_samples: int, batch: int, seed: int
) -> list[Sampled]:
    """Return each layer's sample: the same tokens in every layer, drawn at random from randomly
    chosen sequences."""
    random = np.random.default_rng(seed)
    chosen = _enough(sequences, SPREAD * num_samples, random)
    total = sum(map(len, chosen))
    wanted = np.zeros(total, bool)
    wanted[random.choice(total, min(num_samples, total), replace=False)] = True
    check_sequences(opened.model, chosen)
    parts: list[list[Sampled]] = [[] for _ in opened.layers]
    rows = np.zeros(0, np.int64)

    def keep(routed: Routed) -> np.ndarray:
        at = torch.from_numpy(rows).to(routed.hidden.device)
        weights = routed.weights[at].double().cpu().numpy()
        parts[routed.layer].append(Sampled(routed.hidden[at], routed.selected[rows], weights))
        return routed.selected

    num_done = 0
    with OneExpertRunner(opened, keep) as runner:
        for start in range(0, len(chosen), batch):
            ids, mask = padded(chosen[start : start + batch])
            tokens = np.flatnonzero(real_rows(ids, mask))
            rows = tokens[wanted[num_done : num_done + len(tokens)]]
            runner.forward(ids, mask)
            num_done += len(tokens)
    return [_concatenated(layer) for layer in parts]


def layer_similarity(opened: MoeModel, index: int, sample: Sampled) -> Similarity:
    """Return one layer's similarity, in arrays [1, E, E]."""
    sums = _Sums(opened.shape.num_experts, sample)
    room = opened.shape.num_experts * sample.hidden.shape[1] * sample.hidden.element_size()
    step = max(1, _OUTPUT_NBYTES // room)
    for start in range(0, len(sample.hidden), step):
        rows = slice(start, start + step)
        sums.add(_outputs(opened, index, sample.hidden[rows]), rows)
    return sums.similarity()


def _outputs(opened: MoeModel, index: int, hidden: torch.Tensor) -> torch.Tensor:
    """Return [E, n, H]: the output of every expert on every token. Each expert is read once."""
    layer = opened.layers[index]
    expert = ExpertBuffer(opened)
    outputs = hidden.new_empty(opened.shape.num_experts, *hidden.shape)
    with torch.inference_mode():
        for number, out in enumerate(outputs):
            out.copy_(expert_forward(layer.experts, expert.read(index, number), hidden))
    opened.store.check_unchanged()
    return outputs


class _Sums:
    """Sums over the sampled tokens of a layer, in float64."""

    def __init__(self, num_experts: int, sample: Sampled) -> None:
        self._sample = sample
        self._routed = np.bincount(sample.selected.ravel(), minlength=num_experts)
        # An expert that no sampled token selected is measured on all of them, at the layer's mean
        # weight of a rank.
        self._borrowing = np.flatnonzero(self._routed == 0).tolist()
        self._borrowed_weight = float(np.sqrt((sample.weights**2).mean()))
        self._cosine = np.zeros((num_experts, num_experts))
        self._loss = np.zeros((num_experts, num_experts))
        self._left_out = np.zeros(num_experts)

    def add(self, outputs: torch.Tensor, rows: slice) -> None:
        """Add `outputs` [E, n, H] of these rows of the sample."""
        num_experts, num_tokens, width = outputs.shape
        selected = self._sample.selected[rows]
        weights = self._sample.weights[rows]
        step = max(1, _BLOCK_NBYTES // (num_experts * width * 8))
        for start in range(0, num_tokens, step):
            part = slice(start, start + step)
            block = outputs[:, part].double()
            unit = block / block.norm(dim=2, keepdim=True).clamp(min=torch.finfo(block.dtype).tiny)
            unit = unit.flatten(1)
            self._cosine += (unit @ unit.T).cpu().numpy()
            for expert in np.unique(selected[part]).tolist():
                tokens, ranks = np.nonzero(selected[part] == expert)
                at = torch.from_numpy(tokens).to(block.device)
                self._add_loss(expert, block[:, at], weights[part][tokens, ranks])
            for expert in self._borrowing:
                self._add_loss(expert, block, np.full(block.shape[1], self._borrowed_weight))

    def _add_loss(self, expert: int, outputs: torch.Tensor, weights: np.ndarray) -> None:
        """Add `outputs` [E, t, H] on tokens that selected `expert` with `weights` [t]."""
        squared = torch.from_numpy(weights**2).to(outputs.device)
        exact = outputs[expert]
        self._loss[expert] += ((outputs - exact).square().mean(dim=2) @ squared).cpu().numpy()
        self._left_out[expert] += float(exact.square().mean(dim=1) @ squared)

    def similarity(self) -> Similarity:
        num_tokens = len(self._sample.selected)
        num_served = np.where(self._routed > 0, self._routed, num_tokens)
        loss = self._loss / num_served[:, None]
        left_out = self._left_out / num_served
        return Similarity(
            self._cosine[None] / num_tokens, loss[None], left_out[None], self._routed[None]
        )


def _enough(
    sequences: Sequence[np.ndarray], num_tokens: int, random: np.random.Generator
) -> list[np.ndarray]:
    """Choose sequences in random order until they hold `num_tokens` tokens."""
    chosen = []
    total = 0
    for index in random.permutation(len(sequences)).tolist():
        chosen.append(sequences[index])
        total += len(sequences[index])
        if total >= num_tokens:
            break
    return chosen


def _concatenated(parts: list[Sampled]) -> Sampled:
    return Sampled(
        torch.cat([part.hidden for part in parts]),
        np.concatenate([part.selected for part in parts]),
        np.concatenate([part.weights for part in parts]),
    )
