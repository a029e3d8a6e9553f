"""The widths at which weights besides routed experts are kept on request, and the bytes that they
take. Imports no torch.

They are blocks of ggml's, whose kernels multiply them where they lie: 8 bits are Q8_0, 4 bits are
Q4_0.
"""

from artifacts.errors import BadUsage
from artifacts.formats.gguf.gguf_header import TYPES, GgmlType

DENSE: dict[int, GgmlType] = {8: TYPES["Q8_0"], 4: TYPES["Q4_0"]}
"""The types by their bits."""

LEAST_OUTPUTS = 32
"""Matrices of fewer rows stay as they are: gates of shared experts and the like, which are small
and choose."""


def check_dense(bits: int | None) -> None:
    """Raise BadUsage unless `bits` is a width, or None for weights as they are."""
    if bits is not None and bits not in DENSE:
        raise BadUsage(
            f"--dense {bits} is no width: give {' or '.join(map(str, DENSE))}, or leave it out"
        )


def is_packed(num_outputs: int, num_inputs: int, bits: int) -> bool:
    """Return whether a matrix of this shape is kept at this width: its rows are whole blocks, and
    it has enough rows."""
    return num_inputs % DENSE[bits].num_weights == 0 and num_outputs >= LEAST_OUTPUTS


def dense_nbytes(
    num_outputs: int, num_inputs: int, *, bits: int | None, dtype_nbytes: float
) -> float:
    """The bytes of a matrix besides routed experts in memory, at this width where it has one."""
    if bits is None or not is_packed(num_outputs, num_inputs, bits):
        return num_outputs * num_inputs * dtype_nbytes
    return num_outputs * num_inputs // DENSE[bits].num_weights * DENSE[bits].nbytes
