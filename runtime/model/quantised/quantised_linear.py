"""Linear layers and embeddings whose matrix lies in memory in few bits. Their results are
bit-identical to those of the plain modules with the dequantised matrix."""

import torch
from torch import nn
from torch.nn import functional as F

from artifacts.formats.gguf.ggml import GgmlBlocks
from artifacts.formats.numbers import numbers
from runtime.model.quantised.quantised_matrix import QuantisedMatrix


class QuantisedLinear(nn.Module):
    """Replacement of `nn.Linear` with its matrix in few bits: x [.., I] -> [.., O]. `blocks`, uint8
    [O, bytes of a row], hold the matrix in `form`. `dtype` is the dtype of the plain layer's matrix
    and of the product. The matrix is dequantised at each use; compiled code
    multiplies it where it lies, by tokens of `activations` bits if these are given."""

    activations: int | None = None

    def __init__(
        self,
        blocks: nn.Parameter,
        form: GgmlBlocks,
        bias: nn.Parameter | None,
        *,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.blocks = blocks
        self.bias = bias
        self.form = form
        self.dtype = dtype
        self.out_features, self.in_features = shape

    @property
    def matrix(self) -> QuantisedMatrix:
        return QuantisedMatrix(self.form, {"blocks": self.blocks.data})

    @property
    def weight(self) -> torch.Tensor:
        """The dequantised matrix [O, I]: new memory each time."""
        return numbers(self.form, self.matrix.tensors, self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class QuantisedEmbedding(nn.Module):
    """Replacement of `nn.Embedding` where the head shares its matrix: ids [..] -> dequantised rows
    [.., H] of `blocks`."""

    def __init__(
        self, blocks: nn.Parameter, form: GgmlBlocks, *, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.blocks = blocks
        self.form = form
        self.dtype = dtype
        self.num_embeddings, self.embedding_dim = shape

    @property
    def weight(self) -> torch.Tensor:
        """The dequantised matrix [V, H]: new memory each time."""
        return numbers(self.form, {"blocks": self.blocks.data}, self.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.form.dequantise({"blocks": self.blocks[ids.flatten()]})
        return rows.to(self.dtype).unflatten(0, ids.shape)


def dtype_of(layer: nn.Linear | QuantisedLinear) -> torch.dtype:
    """Return the dtype of a layer's matrix, without dequantising it."""
    return layer.dtype if isinstance(layer, QuantisedLinear) else layer.weight.dtype


def stored(layer: nn.Linear | QuantisedLinear) -> torch.Tensor:
    """Return a layer's matrix as it lies in memory."""
    return layer.blocks if isinstance(layer, QuantisedLinear) else layer.weight
