"""float16 is converted as numpy does it, by the processor and without its help, one number or
several."""

from collections.abc import Callable

import numpy as np
import pytest
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from artifacts.common import float16
from artifacts.common.float16 import float16_as_float, float16_bits
from artifacts.common.llvm_vectors import I16, load, store, vector

EVERY = np.arange(1 << 16, dtype=np.uint16).view(np.int16)


@pytest.fixture(params=[True, False], ids=["processor", "integers"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float16, "HAS_HALVES", float16.HAS_HALVES and request.param)


def converter(
    convert: Callable[..., ir.Value], from_type: ir.Type, count: int
) -> Callable[[np.ndarray, type], np.ndarray]:
    """Converts an array of numbers, so many at a time."""

    @intrinsic
    def one(context, address, out):
        def generate(target, builder, signature, arguments):
            kind = vector(from_type, count) if count > 1 else from_type
            store(builder, convert(builder, load(builder, arguments[0], kind)), arguments[1])
            return target.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    @njit
    def all_of(numbers, out):
        for i in range(0, len(numbers), count):
            one(numbers[i:].ctypes.data, out[i:].ctypes.data)

    def converted(numbers: np.ndarray, dtype: type) -> np.ndarray:
        out = np.empty(len(numbers), dtype)
        all_of(numbers, out)
        return out

    return converted


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("count", [1, 16])
def test_every_float16_becomes_its_float32(count: int) -> None:
    found = converter(float16_as_float, I16, count)(EVERY, np.float32)
    expected = EVERY.view(np.float16).astype("f4")
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("count", [1, 16])
def test_float32_becomes_the_nearest_float16(count: int) -> None:
    """Every float16, the middle between each two that follow each other, and the float32 on both
    sides of a middle."""
    finite = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite[-1] = 2.0**16  # where the next number would be
    between = (finite[1:] + finite[:-1]) / 2
    near = [np.nextafter(between, np.float32(way)) for way in (0, np.inf)]
    numbers = np.concatenate([finite, between, *near, np.float32([np.inf, 1e-40, 3e38, np.nan])])
    numbers = np.concatenate([numbers, -numbers])
    numbers = numbers[: len(numbers) // 16 * 16]
    with np.errstate(over="ignore"):
        expected = numbers.astype(np.float16)
    found = converter(float16_bits, ir.FloatType(), count)(numbers, np.int16)
    assert np.array_equal(found.view(np.float16), expected, equal_nan=True)
