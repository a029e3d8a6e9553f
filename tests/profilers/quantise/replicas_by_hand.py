"""Computes the loss table independently: inputs from the plain model, weights from the files, the
rest in numpy."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from artifacts.quantisation.replica_file import read_replica
from profilers.quantise.lockstep import batches
from profilers.text.batches import padded, real_rows


def heard(
    folder: str, names: list[str], sequences: list[np.ndarray]
) -> list[tuple[torch.Tensor, ...]]:
    """Return inputs [T, H], ids and weights [T, K] of each experts module, as transformers' own
    model calls it.

    All sequences are in one batch, as in calibration, because bfloat16 rounds differently in
    another batch.
    """
    plain = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    [together] = batches(sequences, num_tokens=4096)
    ids, mask = padded(together)
    real = torch.from_numpy(real_rows(ids, mask))
    calls: dict[str, tuple] = {}
    for name in names:

        def keep(module: torch.nn.Module, args: tuple, name: str = name) -> None:
            calls[name] = tuple(part[real] for part in args)

        plain.get_submodule(name).register_forward_pre_hook(keep)
    with torch.inference_mode():
        plain(input_ids=ids, attention_mask=mask)
    return [calls[name] for name in names]


def stored_weight(path: Path, part: str, bits: int) -> np.ndarray:
    """Return one matrix [out, in] of a replica file, computed code by code; of trellis codes by
    their decoder."""
    if f"{part}.group_size" not in header(path):
        return read_replica(path, bits)[part].dequantised().numpy()
    tensors = load_file(path)
    group_size = int(header(path)[f"{part}.group_size"])
    qweight, scales = (tensors[f"{bits}.{part}.{name}"] for name in ("qweight", "scales"))
    num_groups, num_outputs = scales.shape
    codes = codes_of(qweight, bits, num_groups * group_size)
    zeros = np.full(scales.shape, 0.5)
    if bits > 1:
        zeros = codes_of(tensors[f"{bits}.{part}.qzeros"].T, bits, num_outputs).T
    group = np.arange(len(codes)) // group_size
    return (scales.astype(np.float64)[group] * (codes - zeros[group])).T


def codes_of(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return the codes [count, m] in streams of 32-bit words [w, m], bit by bit."""
    single = np.unpackbits(np.ascontiguousarray(words.T).view(np.uint8), axis=1, bitorder="little")
    fields = single[:, : count * bits].reshape(len(single), count, bits).astype(np.int64)
    return (fields << np.arange(bits)).sum(axis=2).T


def header(path: Path) -> dict[str, str]:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
