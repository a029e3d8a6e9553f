"""Replicas of a test's checkpoint, rounded to nearest, and the plain model with the same weights."""

from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from artifacts.quantisation.gptq import group_size_for, round_to_nearest
from artifacts.quantisation.replica_file import read_replica, replica_nbytes, write_replicas
from artifacts.quantisation.replicas import Replicas, in_memory
from artifacts.quantisation.widths import SCALAR_WIDTHS, WIDTHS
from artifacts.shape import FULL_BITS
from runtime.kernels.low_bit import dequantise
from runtime.model.layout import aligned
from runtime.model.open import MoeModel


def made(opened: MoeModel, folder: Path) -> Replicas:
    """All widths of every expert in `folder`; their loss halves with every bit."""
    shape, layout = opened.shape, opened.store.layout
    buffer, is_transposed = aligned(layout.nbytes), opened.layers[0].experts.is_transposed
    files = []
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
                name: round_to_nearest(matrix, bits, group_size_for(matrix.shape[1])).packed()
                for name, matrix in matrices.items()
            }
            | biases
            for bits in SCALAR_WIDTHS
        }
        files.append(folder / f"{key}.safetensors")
        layer, expert = divmod(key, shape.num_experts)
        write_replicas(files[-1], replicas, {"model": opened.fingerprint, "layer": str(layer), "expert": str(expert)})
    loss = np.tile(0.5 ** np.array(WIDTHS), (shape.num_layers, shape.num_experts, 1))
    use = np.random.default_rng(0).random((shape.num_layers, shape.num_experts))
    nbytes = {bits: in_memory(size) for bits, size in replica_nbytes(files[0]).items()}
    lost = loss * use[:, :, None]
    return Replicas({FULL_BITS: shape.expert_nbytes} | nbytes, loss, lost, use, tuple(files)).without_larger()


def put(plain: PreTrainedModel, opened: MoeModel, replicas: Replicas, bits: np.ndarray) -> None:
    """Set every expert of the plain model to its unpacked replica of `bits` [L * E]."""
    buffer, layout = aligned(opened.store.layout.nbytes), opened.store.layout
    for layer in opened.layers:
        module = plain.get_submodule(layer.name)
        for expert in range(opened.shape.num_experts):
            key = layer.index * opened.shape.num_experts + expert
            opened.store.read(layer.index, expert, buffer)
            for name, part in layout.weights(buffer).items():
                if bits[key] != FULL_BITS and not name.endswith("_bias"):
                    packed = read_replica(replicas.files[key], int(bits[key]))[name]
                    part = dequantise(packed).T if module.is_transposed else dequantise(packed)
                getattr(module, name).data[expert] = part
