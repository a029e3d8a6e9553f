"""A layer's experts on one batch, by the arithmetic of the plain model, expert after expert."""

import torch

from profilers.quantise.lockstep import LayerBatch
from runtime.engine.one_expert import ExpertBuffer
from runtime.model.arithmetic import accumulate, assign, expert_forward, gather, weigh
from runtime.model.layers import MoeLayer
from runtime.model.open import MoeModel


def layer_output(opened: MoeModel, layer: MoeLayer, batch: LayerBatch) -> torch.Tensor:
    out = torch.zeros_like(batch.hidden)
    one = ExpertBuffer(opened)
    for expert, assigned in sorted(assign(batch.selected, batch.hidden.device).items()):
        y = expert_forward(
            layer.experts, one.read(layer.index, expert), gather(batch.hidden, assigned)
        )
        accumulate(out, weigh(y, batch.weights, assigned), assigned)
    return out
