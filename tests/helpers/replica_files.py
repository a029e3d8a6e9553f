"""Small files of replicas for tests."""

from pathlib import Path

import torch

from artifacts.quantisation.gptq import round_to_nearest
from artifacts.quantisation.replica_file import write_replicas

NUM_INPUTS = 64


def written(path: Path, *, seed: int, bits: tuple[int, ...] = (2, 4)) -> Path:
    """One projection of an expert, the same for the same seed."""
    weight = torch.randn(32, NUM_INPUTS, generator=torch.Generator().manual_seed(seed))
    packed = {width: {"down_proj": round_to_nearest(weight, width, 32).packed()} for width in bits}
    write_replicas(path, packed, {"model": "m", "layer": "0", "expert": "0"})
    return path
