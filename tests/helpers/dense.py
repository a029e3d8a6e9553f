"""Weights besides experts of few bits, put into plain models."""

import torch
from transformers import PreTrainedModel

from runtime.model.open import MoeModel
from runtime.model.quantised.quantised_linear import QuantisedEmbedding, QuantisedLinear


def put_dense(plain: PreTrainedModel, opened: MoeModel) -> int:
    """Give `plain` the dequantised matrices of `opened`, which is of the same checkpoint; return
    how many. They are dequantised by the formula."""
    count = 0
    with torch.no_grad():
        for name, module in opened.model.named_modules():
            if isinstance(module, QuantisedLinear | QuantisedEmbedding):
                weight = plain.get_submodule(name).weight
                weight.copy_(
                    module.form.dequantise({"blocks": module.blocks.data}).to(weight.dtype)
                )
                count += 1
    return count
