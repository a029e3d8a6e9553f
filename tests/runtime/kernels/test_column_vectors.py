"""Four codes of each output times four digits, as this processor computes them and as others do."""

import numpy as np
import pytest
from numba import njit, types
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import I64, load, splat, store
from runtime.kernels.cpu.lanes import PAIRS
from runtime.kernels.cpu.published import column_vectors


@pytest.mark.parametrize("has_quads", [column_vectors.HAS_QUADS, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_quads_are_multiplied_as_by_their_codes(
    monkeypatch: pytest.MonkeyPatch, bits: int, has_quads: bool
) -> None:
    monkeypatch.setattr(column_vectors, "HAS_QUADS", has_quads)

    @intrinsic
    def add_all(context, words, digits, sums):
        def generate(target, builder, signature, arguments):
            words, digits, sums = arguments
            rows = [load(builder, words, PAIRS, 64 * row) for row in range(bits)]
            for quad in range(8):
                codes = column_vectors.quad_of(builder, rows, bits, quad)
                own = load(builder, digits, I64, 4 * quad)
                place = builder.add(sums, I64(64 * quad))
                own = splat(builder, builder.trunc(own, PAIRS.element))
                store(
                    builder,
                    column_vectors.add_quads(builder, load(builder, place, PAIRS), codes, own),
                    place,
                )
            return target.get_dummy_value()

        return types.void(*[types.int64] * 3), generate

    @njit
    def run(words, digits, sums):
        add_all(words.ctypes.data, digits.ctypes.data, sums.ctypes.data)

    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (bits, 16), np.uint32)
    digits = rng.integers(-128, 128, 36).astype(np.int8)
    sums = np.ones((8, 16), np.int32)
    run(words, digits, sums)
    streams = [sum(int(word) << 32 * row for row, word in enumerate(column)) for column in words.T]
    codes = np.array([[stream >> bits * k & 2**bits - 1 for k in range(32)] for stream in streams])
    codes = codes[:, column_vectors.inputs_of_quads(bits)].reshape(16, 8, 4)
    assert np.array_equal(
        sums, 1 + np.einsum("oqi,qi->qo", codes, digits[:32].reshape(8, 4).astype(int))
    )
