"""What tools.gpu_check checks of products with packed weights: every width against the oracle, and their speed."""

import torch

from artifacts.packing import Packed, packed_shapes


def random_packed(
    num_outputs: int, num_inputs: int, bits: int, group_size: int | None = None, *, device: str = "cpu", seed: int = 0
) -> Packed:
    """Any words are codes: a matrix that takes no time to make, with zero-points from the lowest to the highest."""
    if group_size is None:
        group_size = next((size for size in (128, 64, 32) if num_inputs % size == 0), num_inputs)
    random = torch.Generator().manual_seed(seed)
    shapes = packed_shapes(num_outputs, num_inputs, bits, group_size)
    parts = {}
    for name, (dtype, shape) in shapes.items():
        if name == "scales":
            parts[name] = torch.rand(shape, generator=random).add(0.1).mul(0.01).to(dtype)
        else:
            parts[name] = torch.randint(-(2**31), 2**31, shape, generator=random, dtype=dtype)
    parts = {name: part.to(device) for name, part in parts.items()}
    return Packed(bits, group_size, num_inputs, parts["qweight"], parts["scales"], parts.get("qzeros"))
