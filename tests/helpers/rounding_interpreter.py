"""Triton's interpreter with bfloat16 rounded to the nearest, as GPUs round: it cuts the last bits
off by itself. Import it under the interpreter only."""

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter

_cut = interpreter._convert_float


def _convert(given: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object) -> np.ndarray:
    if source != tl.float32 or target != tl.bfloat16:
        return _cut(given, source, target, mode)
    numbers = torch.from_numpy(np.ascontiguousarray(given, np.float32))
    return numbers.bfloat16().view(torch.uint16).numpy()


def install() -> None:
    interpreter._convert_float = _convert
