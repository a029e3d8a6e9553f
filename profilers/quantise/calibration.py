"""Writes the inputs of a layer to one file and computes each expert's Hessians from them.

GPTQ weighs errors by the moments X^T X of a projection's inputs. An expert that few tokens selected
has too few inputs, so the layer's mean moments are added with the weight of k tokens, k being the
projection's number of inputs. They are negligible for an expert with many tokens and the only
moments of one without. For the second projection the mean is over the expert's own activations on a
sample of the layer's tokens.
"""

import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from torch import nn

from artifacts.common.files import replacing
from artifacts.errors import BadInput
from artifacts.quantisation.gptq import gram
from profilers.quantise.lockstep import LayerBatch
from profilers.quantise.method import first_projection
from runtime.model.arithmetic import assign, expert_forward, project
from runtime.model.layout import is_finite

SAMPLE = 1024  # tokens of a layer's sample
_CHUNK = 2048  # tokens in float32 at a time
# inputs of a projection up to which moments are in float64; above, float32 saves memory
_EXACT_UP_TO = 1024
_CPU = torch.device("cpu")

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs of one layer's experts in a file: T tokens without padding, in the order of the
    batches.

    `moments` is the file of the layer's mean moments X^T X / T.
    """

    path: Path
    moments: Path
    num_tokens: int
    width: int
    dtype: torch.dtype

    def read(self, rows: np.ndarray, device: torch.device = _CPU) -> Iterator[torch.Tensor]:
        """Yield the inputs of these tokens in float32, in parts [n, H]."""
        for start in range(0, len(rows), _CHUNK):
            yield self.stored(rows[start : start + _CHUNK]).to(device).float()

    def stored(self, rows: np.ndarray) -> torch.Tensor:
        """Return the inputs of these tokens as the model computed them, [n, H]."""
        inputs = torch.empty(len(rows), self.width, dtype=self.dtype)
        with self.path.open("rb", buffering=0) as file:
            # Read row by row: mapped pages would count as this process's memory, up to the whole
            # layer's inputs.
            for target, row in zip(inputs.view(torch.uint8).numpy(), rows.tolist(), strict=True):
                count = os.preadv(file.fileno(), [target], row * target.nbytes)
                assert count == target.nbytes, f"{self.path} ends in row {row}"
        return inputs

    def mean_moments(self) -> torch.Tensor:
        """[H, H], float64 up to 1024 inputs and else float32."""
        flat = torch.from_numpy(np.fromfile(self.moments, np.uint8))
        return flat.view(moments_dtype(self.width)).view(self.width, self.width)

    def sample(self) -> np.ndarray:
        """Return the rows of the layer's sample: at most `SAMPLE`, evenly spaced."""
        return spaced(self.num_tokens, SAMPLE)


def spaced(total: int, most: int) -> np.ndarray:
    """Return at most `most` of `total` indices, evenly spaced: index i is `i * total // most`."""
    return np.arange(total) if total <= most else np.arange(most) * total // most


def moments_dtype(num_inputs: int) -> torch.dtype:
    """Return the type in which X^T X of a projection is summed."""
    return torch.float64 if num_inputs <= _EXACT_UP_TO else torch.float32


def keep_inputs(batches: Sequence[LayerBatch], folder: Path, layer: int) -> LayerInputs:
    """Write a layer's inputs and their mean moments into `folder`. Raises OutOfResources when the
    disk is full, and BadInput when the model's hidden states are not finite."""
    hidden = batches[0].hidden
    width = hidden.shape[1]
    dtype = hidden.dtype
    inputs = LayerInputs(
        path=folder / f"layer-{layer:03}.inputs",
        moments=folder / f"layer-{layer:03}.moments",
        num_tokens=sum(int(is_real(batch).sum()) for batch in batches),
        width=width,
        dtype=dtype,
    )
    total = torch.zeros(width, width, dtype=moments_dtype(width), device=hidden.device)
    with replacing(inputs.path) as temporary, temporary.open("wb") as file:
        for batch in batches:
            real = batch.hidden[torch.from_numpy(is_real(batch)).to(hidden.device)]
            file.write(real.cpu().contiguous().view(torch.uint8).numpy())
            for part in real.split(_CHUNK):
                total += gram(part.float())
    if not is_finite(total):
        raise BadInput(
            f"layer {layer}: hidden states on this text are NaN or infinite: calibrate on other "
            "text"
        )
    with replacing(inputs.moments) as temporary:
        total.div_(inputs.num_tokens).cpu().numpy().tofile(temporary)
    return inputs


def is_real(batch: LayerBatch) -> np.ndarray:
    """Return [T] bool: which rows are tokens and not padding."""
    return batch.selected[:, 0] >= 0


class LayerTokens:
    """The tokens of a layer that selected each expert; `assigned` lists them by batch and expert,
    as `gather` takes them."""

    def __init__(self, batches: Sequence[LayerBatch]) -> None:
        self.assigned = [assign(batch.selected, batch.hidden.device) for batch in batches]
        self._weights = [batch.weights.double().cpu().numpy() for batch in batches]
        real = [is_real(batch) for batch in batches]
        before = np.cumsum([0, *(part.sum() for part in real)])
        self._numbers = [
            np.cumsum(part) - 1 + start for part, start in zip(real, before, strict=False)
        ]

    def by_batch(self, expert: int) -> tuple[np.ndarray, ...]:
        """Return the rows of `LayerInputs` that selected this expert in each batch, in the order of
        `assigned`."""
        none = np.zeros(0, np.int64)
        return tuple(
            [
                numbers[assigned[expert].tokens.cpu().numpy()] if expert in assigned else none
                for assigned, numbers in zip(self.assigned, self._numbers, strict=True)
            ]
        )

    def of(self, expert: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of `LayerInputs` that selected this expert, ascending, and its routing
        weights, float64."""
        rows = [np.zeros(0, np.int64)]
        weights = [np.zeros(0)]
        for assigned, gates, numbers in zip(
            self.assigned, self._weights, self._numbers, strict=True
        ):
            if expert in assigned:
                tokens, ranks = (place.cpu().numpy() for place in assigned[expert])
                order = np.argsort(tokens)
                rows.append(numbers[tokens[order]])
                weights.append(gates[tokens[order], ranks[order]])
        return np.concatenate(rows), np.concatenate(weights)


# One expert


def oriented(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """Return a projection of the module as [out, in]."""
    return weight.T.contiguous() if module.is_transposed else weight


def describing(module: nn.Module) -> bytes:
    """Return the pickled experts module without its parameters: the attributes that an expert's
    arithmetic reads."""
    bare = module.__class__.__new__(module.__class__)
    bare.__dict__ = {
        name: value for name, value in module.__dict__.items() if name != "moectl_forward"
    }
    bare._parameters = {}
    return pickle.dumps(bare)


def activations(module: nn.Module, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """Return the inputs of the expert's second projection: x [n, H] -> [n, I]."""
    y = project(module, weights, first_projection(module), x)
    return module._apply_gate(y) if module.has_gate else module.act_fn(y)


def output(module: nn.Module, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """Compute the expert on x [n, H] -> [n, H] without a routing weight, in parts because I may be
    large."""
    return torch.cat([expert_forward(module, weights, part) for part in x.split(_CHUNK // 4)])


def hessians(
    module: nn.Module, weights: Weights, inputs: LayerInputs, rows: np.ndarray
) -> dict[str, tuple[torch.Tensor, int]]:
    """Return the Hessian 2/n X^T X [in, in] of each projection: over the tokens in `rows` and the
    layer's mean."""
    device = weights["down_proj"].device
    first = inputs.mean_moments().to(device) * inputs.width
    second = _mean_second(module, weights, inputs)
    second *= len(second)
    for x in inputs.read(rows, device):
        first += gram(x)
        second += gram(activations(module, weights, x))
    totals = {first_projection(module): first, "down_proj": second}
    return {name: total.mul_(2 / (len(rows) + len(total))) for name, total in totals.items()}


def _mean_second(module: nn.Module, weights: Weights, inputs: LayerInputs) -> torch.Tensor:
    """Return [I, I]: the mean X^T X of the expert's activations on the layer's sample."""
    rows = inputs.sample()
    seen = (activations(module, weights, x) for x in inputs.read(rows, weights["down_proj"].device))
    moments = (gram(y).to(moments_dtype(y.shape[1])) for y in seen)
    return reduce(torch.Tensor.add_, moments) / len(rows)
