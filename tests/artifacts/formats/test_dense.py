"""The widths of weights besides experts: their bytes, and which matrices have them."""

import pytest

from artifacts.errors import BadUsage
from artifacts.formats.dense import check_dense, dense_nbytes, is_packed


@pytest.mark.parametrize(
    ("shape", "bits", "nbytes"),
    [
        ((64, 96), None, 64 * 96 * 2),
        ((64, 96), 8, 64 * 3 * 34),
        ((64, 96), 4, 64 * 3 * 18),
        ((64, 95), 4, 64 * 95 * 2),  # no whole blocks
        ((31, 96), 8, 31 * 96 * 2),  # a gate
    ],
)
def test_bytes_of_a_matrix(shape: tuple[int, int], bits: int | None, nbytes: int) -> None:
    assert dense_nbytes(*shape, bits=bits, dtype_nbytes=2) == nbytes
    assert bits is None or is_packed(*shape, bits) == (nbytes < shape[0] * shape[1] * 2)


def test_other_widths_are_refused() -> None:
    for bits in (None, 8, 4):
        check_dense(bits)
    for bits in (0, 3, 16):
        with pytest.raises(
            BadUsage, match=f"--dense {bits} is no width: give 8 or 4, or leave it out"
        ):
            check_dense(bits)
