"""llama.cpp's products of rows of ggml's blocks with a token that it rounded to 8 bits, from the
libraries that it is built into."""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from numba import njit

from artifacts.formats.gguf.ggml import GGML
from runtime.model.quantised.stored_matrix import StoredMatrix

_ARGUMENTS = (
    ctypes.c_int,  # weights
    ctypes.c_void_p,  # the product, float32
    ctypes.c_size_t,
    ctypes.c_void_p,  # the row
    ctypes.c_size_t,
    ctypes.c_void_p,  # the token
    ctypes.c_size_t,
    ctypes.c_int,  # rows
)


class GgmlProducts:
    """One matrix of experts, times a token of any 8-bit numbers."""

    def __init__(self, folder: str, matrix: StoredMatrix) -> None:
        self._matrix = matrix
        self._rows = _rows_of(folder, matrix.codes.kind)
        # scales are then 0.747 in float32, 1.8 in float16; tiny ones would be slow
        self._token = np.full(2 * matrix.num_inputs, 0x3F, np.uint8)
        self._y = np.zeros(1, np.float32)

    def multiply(self, start: int) -> None:
        """Multiply by the rows of the matrix in the expert at this address."""
        matrix = self._matrix
        nbytes = matrix.codes.nbytes // matrix.num_outputs
        places = self._token.ctypes.data, self._y.ctypes.data
        self._rows(
            start + matrix.codes.start, matrix.num_outputs, nbytes, matrix.num_inputs, *places
        )


@cache
def _libraries(folder: str) -> ctypes.CDLL:
    if Path(folder).is_file():  # such as the wheel xllamacpp, which is all of llama.cpp
        found = ctypes.CDLL(folder)
        found.ggml_cpu_init()
        return found
    ctypes.CDLL(str(Path(folder, "libggml-base.so")), mode=ctypes.RTLD_GLOBAL)
    found = ctypes.CDLL(str(Path(folder, "libggml-cpu.so")), mode=ctypes.RTLD_GLOBAL)
    found.ggml_cpu_init()
    return found


@cache
def _rows_of(folder: str, kind: str) -> object:
    """Return a loop over rows, compiled so that calls from Python do not count."""
    name = kind.lower().replace("_k", "_K")
    token = "q8_K" if GGML[kind].num_weights == 256 else "q8_0"
    product = getattr(_libraries(folder), f"ggml_vec_dot_{name}_{token}")
    product.argtypes = _ARGUMENTS
    product.restype = None

    @njit
    def rows(first: int, count: int, nbytes: int, num_inputs: int, token: int, y: int) -> None:
        for row in range(count):
            product(num_inputs, y, 0, first + row * nbytes, 0, token, 0, 1)

    return rows
