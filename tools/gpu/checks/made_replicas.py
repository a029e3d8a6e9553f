"""Replicas of a small checkpoint, rounded to nearest, and the plain model with the same weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from artifacts.quantisation.gptq import group_size_for, round_to_nearest
from artifacts.quantisation.packing import Packed
from artifacts.quantisation.replica_file import read_replica, replica_nbytes, write_replicas
from artifacts.quantisation.replicas import Replicas, in_memory
from artifacts.quantisation.trellis.trellis import Trellis, fitting
from artifacts.quantisation.widths import NOTHING, SCALAR_WIDTHS, WIDTHS, Width, as_width
from artifacts.shape import FULL_BITS, Shape
from runtime.kernels.low_bit import dequantise
from runtime.model.arithmetic import DOWN
from runtime.model.layout import aligned
from runtime.model.open import MoeModel
from tools.gpu.checks.trellis import random_trellis

CODED = (0.8, 1.25, 2, 4)


def made(opened: MoeModel, folder: Path, *, is_coded: bool = False) -> Replicas:
    """All packed widths of every expert in `folder`, or some in trellis codes, whose codes are
    random; their loss halves with every bit."""
    shape = opened.shape
    layout = opened.store.layout
    buffer = aligned(layout.nbytes)
    is_transposed = opened.layers[0].experts.is_transposed
    files = []
    widths = CODED if is_coded else SCALAR_WIDTHS
    for key in range(shape.num_keys):
        opened.store.read(*divmod(key, shape.num_experts), buffer)
        parts = layout.weights(buffer)
        biases = {name: part.clone() for name, part in parts.items() if name.endswith("_bias")}
        matrices = {
            name: (part.T if is_transposed else part).float().contiguous()
            for name, part in parts.items()
            if name not in biases
        }
        replicas = {
            bits: {
                name: _coded(matrix, bits, is_rotated=name == DOWN, seed=key)
                if is_coded
                else _packed(matrix, bits)
                for name, matrix in matrices.items()
            }
            | biases
            for bits in widths
        }
        files.append(folder / f"{key}.safetensors")
        layer, expert = divmod(key, shape.num_experts)
        write_replicas(
            files[-1],
            replicas,
            {"model": opened.fingerprint, "layer": str(layer), "expert": str(expert)},
        )
    loss = np.tile(
        np.where(np.isin(WIDTHS, [NOTHING, *widths]), 0.5 ** np.array(WIDTHS), np.nan),
        (*_grid(shape), 1),
    )
    use = np.random.default_rng(0).random(_grid(shape))
    nbytes = {bits: in_memory(size) for bits, size in replica_nbytes(files[0]).items()}
    lost = loss * use[:, :, None]
    return Replicas(
        {FULL_BITS: shape.expert_nbytes} | nbytes, loss, lost, use, tuple(files)
    ).without_larger()


def _grid(shape: Shape) -> tuple[int, int]:
    return shape.num_layers, shape.num_experts


def _packed(matrix: torch.Tensor, bits: int) -> Packed:
    return round_to_nearest(matrix, bits, group_size_for(matrix.shape[1])).packed()


def _coded(matrix: torch.Tensor, bits: Width, *, is_rotated: bool, seed: int) -> Trellis:
    """Return random codes of `bits` bits, as large as the matrix."""
    rate = fitting(*matrix.shape, bits, is_rotated=is_rotated)
    coded = random_trellis(*matrix.shape, *rate, is_rotated=is_rotated, seed=seed)
    return replace(coded, scale=matrix.std().reshape(1))


def put(plain: PreTrainedModel, opened: MoeModel, replicas: Replicas, bits: np.ndarray) -> None:
    """Set every expert of the plain model to its unpacked replica of `bits` [L * E], or to
    nothing."""
    buffer = aligned(opened.store.layout.nbytes)
    layout = opened.store.layout
    for layer in opened.layers:
        module = plain.get_submodule(layer.name)
        for expert in range(opened.shape.num_experts):
            key = layer.index * opened.shape.num_experts + expert
            opened.store.read(layer.index, expert, buffer)
            for name, part in layout.weights(buffer).items():
                if bits[key] == NOTHING:
                    part = torch.zeros_like(part)
                elif bits[key] != FULL_BITS and not name.endswith("_bias"):
                    replica = read_replica(replicas.files[key], as_width(bits[key]))[name]
                    matrix = (
                        replica.dequantised()
                        if isinstance(replica, Trellis)
                        else dequantise(replica)
                    )
                    part = matrix.T if module.is_transposed else matrix
                getattr(module, name).data[expert] = part
