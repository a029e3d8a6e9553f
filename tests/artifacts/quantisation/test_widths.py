"""The table of widths: its columns, and how widths are told."""

import numpy as np
import pytest

from artifacts.quantisation.widths import (
    BASES,
    WIDTHS,
    as_width,
    column_of,
    columns_of,
    label,
    listed,
)


def test_a_column_is_the_place_in_the_table_and_not_the_bits() -> None:
    assert [column_of(bits) for bits in WIDTHS] == [*range(11)]
    assert columns_of(np.array([[8, 1], [0.6, 2.5]])).tolist() == [[10, 3], [1, 7]]
    assert columns_of(()).tolist() == [] and BASES == (16, 8, 4, 3, 2)
    with pytest.raises(ValueError):
        column_of(5)
    with pytest.raises(AssertionError):
        columns_of([5])


def test_a_whole_width_is_an_int_however_it_is_written() -> None:
    assert [str(as_width(bits)) for bits in ("2", 2.0, "2.50", 0.6)] == ["2", "2", "2.5", "0.6"]
    assert [label(bits) for bits in (2, 1.25)] == ["2", "1_25"]


def test_widths_in_a_sentence() -> None:
    assert listed() == "1, 2, 3, 4, 8" and listed(last=" or ") == "1, 2, 3, 4 or 8"
    assert [listed([3], last=" and "), listed([])] == ["3", ""]
