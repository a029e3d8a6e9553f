"""Measures what one expert is worth in place of another: on a sample of tokens, every expert of a layer is computed.

Memory is bounded: the inputs of the sample in every layer, the outputs of one layer's experts, and one expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from artifacts.errors import BadUsage
from artifacts.routing.similarity import Similarity
from profilers.text.batches import check_sequences, padded, real_rows
from runtime.engine.one_expert import ExpertBuffer, OneExpertRunner, Routed
from runtime.model.arithmetic import expert_forward
from runtime.model.open import MoeModel

# Tokens of one sequence are alike: the sample is drawn from so many times as many tokens.
SPREAD = 4
_OUTPUT_NBYTES = 1 << 30  # outputs of one layer's experts kept at a time; beyond it experts are read again
_BLOCK_NBYTES = 64 << 20  # of them in float64 at a time


@dataclass(frozen=True, slots=True)
class Sampled:
    """One layer's sample: n tokens as they reach its experts."""

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
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Similarity:
    """Cosines of experts' outputs and the loss of letting one stand in for another, on `num_samples` tokens drawn from
    `sequences` (all of them if there are fewer). `progress` hears of layers done and layers in all."""
    if num_samples < 1:
        raise BadUsage(f"similarity needs at least one sample, not {num_samples}")
    samples = sample_inputs(opened, sequences, num_samples=num_samples, batch=batch, seed=seed)
    layers = []
    for index in range(opened.shape.num_layers):
        layers.append(layer_similarity(opened, index, samples.pop(0)))
        progress(index + 1, opened.shape.num_layers)
    return Similarity.stack(layers)


def sample_inputs(
    opened: MoeModel, sequences: Sequence[np.ndarray], *, num_samples: int, batch: int, seed: int
) -> list[Sampled]:
    """The same tokens in every layer: drawn at random from randomly chosen sequences."""
    random = np.random.default_rng(seed)
    chosen = _enough(sequences, SPREAD * num_samples, random)
    total = sum(map(len, chosen))
    wanted = np.zeros(total, bool)
    wanted[random.choice(total, min(num_samples, total), replace=False)] = True
    check_sequences(opened.model, chosen)
    kept: list[list[Sampled]] = [[] for _ in opened.layers]
    rows = np.zeros(0, np.int64)

    def keep(routed: Routed) -> np.ndarray:
        at = torch.from_numpy(rows).to(routed.hidden.device)
        weights = routed.weights[at].double().cpu().numpy()
        kept[routed.layer].append(Sampled(routed.hidden[at], routed.selected[rows], weights))
        return routed.selected

    done = 0
    with OneExpertRunner(opened, keep) as runner:
        for start in range(0, len(chosen), batch):
            ids, mask = padded(chosen[start : start + batch])
            at = np.flatnonzero(real_rows(ids, mask))
            rows = at[wanted[done : done + len(at)]]
            runner.forward(ids, mask)
            done += len(at)
    return [_joined(parts) for parts in kept]


def layer_similarity(opened: MoeModel, index: int, sample: Sampled) -> Similarity:
    """One layer's similarity, arrays [1, E, E]."""
    sums = _Sums(opened.shape.num_experts, sample)
    room = opened.shape.num_experts * sample.hidden.shape[1] * sample.hidden.element_size()
    step = max(1, _OUTPUT_NBYTES // room)
    for start in range(0, len(sample.hidden), step):
        rows = slice(start, start + step)
        sums.add(_outputs(opened, index, sample.hidden[rows]), rows)
    return sums.similarity()


def _outputs(opened: MoeModel, index: int, hidden: torch.Tensor) -> torch.Tensor:
    """[E, n, H]: every expert on every token, each read once."""
    layer, expert = opened.layers[index], ExpertBuffer(opened)
    outputs = hidden.new_empty(opened.shape.num_experts, *hidden.shape)
    with torch.inference_mode():
        for number, out in enumerate(outputs):
            out.copy_(expert_forward(layer.experts, expert.read(index, number), hidden))
    return outputs


class _Sums:
    """What adds up over the sampled tokens of a layer, in float64."""

    def __init__(self, num_experts: int, sample: Sampled) -> None:
        self._sample = sample
        self._routed = np.bincount(sample.selected.ravel(), minlength=num_experts)
        # What no sampled token was routed to borrows all of them, at the weight that a rank has in this layer.
        self._borrowing = np.flatnonzero(self._routed == 0).tolist()
        self._borrowed_weight = float(np.sqrt((sample.weights**2).mean()))
        self._cosine = np.zeros((num_experts, num_experts))
        self._loss = np.zeros((num_experts, num_experts))
        self._left_out = np.zeros(num_experts)

    def add(self, outputs: torch.Tensor, rows: slice) -> None:
        """outputs [E, n, H] of these rows of the sample."""
        num_experts, num_tokens, width = outputs.shape
        selected, weights = self._sample.selected[rows], self._sample.weights[rows]
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
        """outputs [E, t, H] on tokens that `expert` serves with `weights` [t]."""
        squared = torch.from_numpy(weights**2).to(outputs.device)
        own = outputs[expert]
        self._loss[expert] += ((outputs - own).square().mean(dim=2) @ squared).cpu().numpy()
        self._left_out[expert] += float(own.square().mean(dim=1) @ squared)

    def similarity(self) -> Similarity:
        num_tokens = len(self._sample.selected)
        served = np.where(self._routed > 0, self._routed, num_tokens)
        loss, left_out = self._loss / served[:, None], self._left_out / served
        return Similarity(self._cosine[None] / num_tokens, loss[None], left_out[None], self._routed[None])


def _enough(sequences: Sequence[np.ndarray], num_tokens: int, random: np.random.Generator) -> list[np.ndarray]:
    """Sequences in random order until they hold so many tokens."""
    chosen, total = [], 0
    for at in random.permutation(len(sequences)).tolist():
        chosen.append(sequences[at])
        total += len(sequences[at])
        if total >= num_tokens:
            break
    return chosen


def _joined(parts: list[Sampled]) -> Sampled:
    return Sampled(
        torch.cat([part.hidden for part in parts]),
        np.concatenate([part.selected for part in parts]),
        np.concatenate([part.weights for part in parts]),
    )
