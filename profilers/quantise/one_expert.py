"""Quantises one expert: writes all its replicas to one file, with the loss of each, and its outputs
to another.

This is the task of a worker of `moectl quantize`. It needs only its arguments and two files of its
layer's inputs, so any process can do it; the files have the same bytes on every machine.
"""

import pickle
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from artifacts.errors import BadInput, OutOfResources
from artifacts.quantisation.gptq import Quantized, group_size_for, quantize
from artifacts.quantisation.replica_file import (
    SOURCE,
    file_hash,
    read_metadata,
    replica_nbytes,
    write_replicas,
)
from artifacts.quantisation.trellis.trellis import Trellis
from artifacts.quantisation.widths import Width
from profilers.quantise.calibration import (
    LayerInputs,
    Weights,
    hessians,
    oriented,
    output,
    spaced,
)
from profilers.quantise.expert_outputs import OutputRows
from profilers.quantise.method import TRELLIS, Method
from runtime.model.layout import ExpertLayout

Replicas = Mapping[str, Mapping[Width, Quantized | Trellis]]

LOSS_TOKENS = 2048  # tokens of an expert, at most, on which its replicas' losses are measured


@dataclass(frozen=True, slots=True)
class ExpertTask:
    """The arguments of one expert's quantisation, to `path` unless that is None. `weights` are its
    bytes as `layout` describes them, and `module` is the module that `calibration.describing`
    returns. `rows` of `inputs` are the tokens that selected it, `gates` its routing weights there.
    `outputs` are wanted besides, if given."""

    path: Path | None
    model: str
    layer: int
    expert: int
    method: Method
    module: bytes
    layout: ExpertLayout
    weights: np.ndarray
    inputs: LayerInputs
    rows: np.ndarray
    gates: np.ndarray
    device: str = "cpu"
    outputs: OutputRows | None = None


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """The content of a replica file's metadata, for the rows of `quant_loss` and `replicas`;
    `nbytes` by width."""

    path: Path
    metadata: Mapping[str, str]
    nbytes: Mapping[Width, int]
    hash: str


@dataclass(frozen=True, slots=True)
class ExpertDone:
    """A task that is done; `record` is None, and `has_outputs` is False, where that was not
    wanted."""

    layer: int
    expert: int
    record: ReplicaRecord | None
    has_outputs: bool


def work(unit: ExpertTask) -> ExpertDone:
    """Write an expert's outputs and its replicas, as far as they are wanted. Raises OutOfResources
    when the disk is full or the inputs are on another machine."""
    if not unit.inputs.path.exists():
        raise OutOfResources(
            f"{socket.gethostname()} sees no {unit.inputs.path}: workers on other machines need "
            "the store in a folder that all of them share, under the same name"
        )
    if unit.outputs:
        write_outputs(unit)
    record = quantise(unit) if unit.path else None
    return ExpertDone(unit.layer, unit.expert, record, bool(unit.outputs))


def write_outputs(unit: ExpertTask) -> None:
    """Compute one expert on its tokens, as the model does, and write what it adds to them."""
    device = torch.device(unit.device)
    with torch.inference_mode():
        weights = unit.layout.weights(torch.from_numpy(unit.weights).to(device))
        unit.outputs.write(pickle.loads(unit.module), weights, unit.inputs, device)


def quantise(unit: ExpertTask) -> ReplicaRecord:
    """Quantise one expert and write its file."""
    module = pickle.loads(unit.module)
    with torch.inference_mode():
        parts = unit.layout.weights(torch.from_numpy(unit.weights))
        weights = {name: part.to(unit.device).float() for name, part in parts.items()}
        replicas = (_coded if unit.method.recipe == TRELLIS else _packed)(unit, module, weights)
        losses = _losses(module, weights, replicas, unit)
    biases = {name: part for name, part in parts.items() if name.endswith("_bias")}
    files = {
        bits: {name: by_bits[bits].packed() for name, by_bits in replicas.items()} | biases
        for bits in unit.method.bits
    }
    write_replicas(unit.path, files, _metadata(unit) | losses)
    return record(unit.path)


def record(path: Path) -> ReplicaRecord:
    """Return the record of a file that was written."""
    return ReplicaRecord(path, read_metadata(path), replica_nbytes(path), file_hash(path))


def tables(records: Sequence[ReplicaRecord]) -> dict[str, pa.Table]:
    """Return the rows of `quant_loss` and `replicas`, by layer, expert and width."""
    entries = [(each, bits) for each in records for bits in sorted(each.nbytes)]
    keys = {
        name: np.array([int(each.metadata[name]) for each, _ in entries], np.uint16)
        for name in ("layer", "expert")
    }
    keys["bits"] = np.array([bits for _, bits in entries], np.float64)
    of_width = {
        name: [float(each.metadata[f"{bits}.{name}"]) for each, bits in entries]
        for name in ("mse", "relative", "gated")
    }
    of_expert = {
        "samples": [int(each.metadata["samples"]) for each, _ in entries],
        "basis": [each.metadata["basis"] for each, _ in entries],
        "energy": [float(each.metadata["energy"]) for each, _ in entries],
    }
    files = {
        "file": [f"{each.path.parent.name}/{each.path.name}" for each, _ in entries],
        "nbytes": [each.nbytes[bits] for each, bits in entries],
        "hash": [each.hash for each, _ in entries],
    }
    return {"quant_loss": pa.table(keys | of_width | of_expert), "replicas": pa.table(keys | files)}


def _coded(unit: ExpertTask, module: nn.Module, weights: Weights) -> Replicas:
    """The projections in trellis codes, by name and width."""
    from profilers.quantise.trellis_calibration import Tokens, code_expert  # imports numba

    tokens = Tokens.of(unit.inputs, unit.rows, unit.gates, torch.device(unit.device))
    try:
        return code_expert(module, weights, unit.inputs, tokens, unit.method)
    except BadInput as problem:
        raise BadInput(f"layer {unit.layer}, expert {unit.expert}: {problem}") from problem


def _packed(unit: ExpertTask, module: nn.Module, weights: Weights) -> Replicas:
    """The projections by GPTQ, by name and width."""
    by_name = hessians(module, weights, unit.inputs, unit.rows)
    return {
        name: _quantised(unit, module, name, weights[name], hessian)
        for name, hessian in by_name.items()
    }


def _quantised(
    unit: ExpertTask, module: nn.Module, name: str, weight: torch.Tensor, hessian: torch.Tensor
) -> dict[int, Quantized]:
    method = unit.method
    weight = oriented(module, weight)
    group_size = group_size_for(weight.shape[1], method.group_size)
    try:
        return quantize(
            weight, hessian, method.bits, group_size, damp=method.damp, recipe=method.recipe
        )
    except BadInput as problem:
        raise BadInput(f"layer {unit.layer}, expert {unit.expert}, {name}: {problem}") from problem


def _losses(
    module: nn.Module, weights: Weights, replicas: Replicas, unit: ExpertTask
) -> dict[str, str]:
    """Per width: mse and relative of the expert's output without routing weight, gated with it; all
    as texts."""
    own = spaced(len(unit.rows), LOSS_TOKENS)
    rows = unit.rows[own]
    is_own = len(unit.rows) >= unit.method.min_samples
    judged = rows if is_own else np.concatenate([rows, unit.inputs.sample()])
    x = torch.cat(list(unit.inputs.read(judged, torch.device(unit.device))))
    exact = output(module, weights, x)
    # Sums over the own tokens; where they are too many to look at all, as many times those that are
    # looked at.
    gates = torch.from_numpy(unit.gates[own] ** 2 * (len(unit.rows) / max(1, len(own)))).to(
        x.device
    )
    texts = {"samples": str(len(unit.rows)), "basis": "own" if is_own else "layer"}
    texts["energy"] = _text(gates @ _squares(exact[: len(own)]))
    mean_square = float(_squares(exact).mean() / exact.shape[1])
    for bits in unit.method.bits:
        squares = _squares(
            output(module, weights | _dequantised(module, replicas, bits), x) - exact
        )
        mse = float(squares.mean() / exact.shape[1])
        texts[f"{bits}.mse"] = _text(mse)
        texts[f"{bits}.relative"] = _text(mse / mean_square if mean_square else 0.0)
        texts[f"{bits}.gated"] = _text(gates @ squares[: len(own)])
    return texts


def _dequantised(module: nn.Module, replicas: Replicas, bits: Width) -> Weights:
    """Return the weights of one width as the file will hold them, in the module's own
    orientation."""
    weights = {name: by_bits[bits].dequantised() for name, by_bits in replicas.items()}
    return {name: weight.T if module.is_transposed else weight for name, weight in weights.items()}


def _squares(x: torch.Tensor) -> torch.Tensor:
    """Return each token's sum of squares in float64: [n, H] -> [n]."""
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).square()


def _metadata(unit: ExpertTask) -> dict[str, str]:
    method = unit.method
    return {
        "model": unit.model,
        SOURCE: unit.layout.digest(torch.from_numpy(unit.weights)),
        "layer": str(unit.layer),
        "expert": str(unit.expert),
        "recipe": method.recipe,
        "damp": repr(method.damp),
        "min_samples": str(method.min_samples),
    }


def _text(value: float | torch.Tensor) -> str:
    """Return the text of a number, exact to the last bit."""
    return repr(float(value))
