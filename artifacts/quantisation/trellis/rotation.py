"""Orthonormal rotations of vectors of any length n = m 2^p, m odd: signs, then a cosine transform
of m by a Hadamard transform of 2^p.

They spread a few large weights over all, so that a matrix looks like Gaussian numbers (QuIP#, Tseng
et al. 2024). A rotation depends on the length alone: all experts of a layer share the rotation of
their inputs, and the rotation of their outputs.
"""

from functools import cache

import numpy as np

_DECIMALS = 12  # of constants: libraries differ in the last bits of cosines
_CHUNK = 2**16  # numbers that are transformed together: they and a copy of them fit the cache


def factors(length: int) -> tuple[int, int]:
    """The odd factor m and the power of two of a length."""
    power = length & -length
    return length // power, power


@cache
def signs(length: int) -> np.ndarray:
    """float32 [n] of 1 and -1, by a hash of the index."""
    bits = (np.arange(length, dtype=np.uint64) * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 15)) * 0x85EBCA77) & 0xFFFFFFFF
    return _fixed(1 - 2 * ((bits ^ (bits >> 13)) >> 31).astype(np.float32))


@cache
def cosines(size: int) -> np.ndarray:
    """The orthonormal cosine transform float32 [m, m] of an odd factor, DCT-II; [[1]] for 1."""
    index = np.arange(size)
    matrix = np.cos(np.pi * (index + 0.5) * index[:, None] / size) * np.sqrt(2 / size)
    matrix[0] = np.sqrt(1 / size)
    return _fixed(matrix.round(_DECIMALS).astype(np.float32))


def rotate(x: np.ndarray) -> np.ndarray:
    """U x for each row of x [..., n], float32 or float64: `T (signs * x)`, where T is the Kronecker
    product of `cosines(m)` and the Hadamard matrix over sqrt(2^p).

    The result is the same on every machine: each number is a chain of additions in one order.
    """
    return _transform(x * signs(x.shape[-1]), cosines(factors(x.shape[-1])[0]))


def rotate_back(x: np.ndarray) -> np.ndarray:
    """U^T x for each row of x [..., n], float32 or float64: the inverse of `rotate`."""
    return _transform(x, cosines(factors(x.shape[-1])[0]).T) * signs(x.shape[-1])


def _transform(x: np.ndarray, odd: np.ndarray) -> np.ndarray:
    rows = x.reshape(-1, x.shape[-1])
    out = np.empty_like(rows)
    count = max(1, _CHUNK // rows.shape[1])
    for first in range(0, len(rows), count):
        out[first : first + count] = _transformed(rows[first : first + count].T, odd).T
    return out.reshape(x.shape)


def _transformed(columns: np.ndarray, odd: np.ndarray) -> np.ndarray:
    """T times each of `columns` [n, c]: every step reads and writes numbers that lie side by
    side."""
    parts = np.array(columns, order="C").reshape(len(odd), -1)
    power = len(columns) // len(odd)
    half = columns.shape[1]
    mixed = np.zeros_like(parts)
    for index, part in enumerate(parts):
        mixed += odd[:, index, None] * part
    spare = parts
    end = power * half
    while half < end:
        low, high = (mixed.reshape(-1, 2, half)[:, side] for side in (0, 1))
        np.add(low, high, out=spare.reshape(-1, 2, half)[:, 0])
        np.subtract(low, high, out=spare.reshape(-1, 2, half)[:, 1])
        mixed, spare, half = spare, mixed, 2 * half
    return (mixed * mixed.dtype.type(np.sqrt(1 / power))).reshape(columns.shape)


def _fixed(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
