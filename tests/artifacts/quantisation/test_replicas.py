"""Sizes and losses of replicas beside a checkpoint that itself has few bits."""

import numpy as np
import pytest

from artifacts.errors import Incompatible
from artifacts.quantisation.replicas import expected_use, typical
from artifacts.quantisation.widths import SCALAR_WIDTHS, column_of, columns_of
from artifacts.shape import FULL_BITS

USE = np.ones((2, 3))


@pytest.mark.parametrize(
    ("bits", "widths"),
    [(16, [1, 2, 3, 4]), (8, [1, 2, 3, 4]), (4.25, [1, 2, 3, 4]), (4, [1, 2, 3])],
)
def test_a_width_that_takes_no_fewer_bytes_is_left_out(bits: float, widths: list[int]) -> None:
    """In groups of 128, a weight takes 4.16 bits at 4."""
    replicas = typical(USE, expert_nbytes=round(bits * 4096), weight_nbytes=bits / 8)
    assert replicas.widths == widths and replicas.nbytes[FULL_BITS] == bits * 4096
    assert replicas.at_full == (4,) * (len(widths) == 3)
    of_4 = column_of(4)
    narrower = columns_of([1, 2, 3])
    assert (
        (replicas.loss[..., of_4] == 0).all()
        == (replicas.lost[..., of_4] == 0).all()
        == (len(widths) == 3)
    )
    assert (replicas.loss[..., narrower] > 0).all() and np.isnan(
        replicas.loss[..., columns_of([0.6, 8])]
    ).all()


def test_eight_bits_stand_in_for_sixteen_and_for_no_fewer_bytes() -> None:
    """They take 8.19 bits a weight, more than an 8-bit float."""
    replicas = typical(USE, expert_nbytes=16 * 4096, weight_nbytes=2.0, widths=SCALAR_WIDTHS)
    assert replicas.widths == [*SCALAR_WIDTHS] and replicas.nbytes[8] == pytest.approx(
        0.512 * 16 * 4096, rel=1e-3
    )
    based = replicas.on_base(8)
    assert (based.widths, based.base, based.nbytes[FULL_BITS]) == (
        [1, 2, 3, 4],
        8,
        replicas.nbytes[8],
    )
    of_4, of_8 = columns_of([4, 8])
    assert not based.lost[..., of_8].any()
    assert based.loss[0, 0, of_4] == replicas.loss[0, 0, of_4] + replicas.loss[0, 0, of_8]
    with pytest.raises(
        Incompatible, match="replicas of 8 bits are no smaller than the experts of the checkpoint"
    ):
        typical(USE, expert_nbytes=8 * 4096, weight_nbytes=1.0, widths=SCALAR_WIDTHS).on_base(8)


def test_what_is_known_to_be_no_smaller_needs_no_replica() -> None:
    replicas = typical(USE, expert_nbytes=4096).without_larger(3, 4)
    assert (replicas.widths, replicas.at_full) == ([1, 2], (3, 4))
    with pytest.raises(
        Incompatible, match="replicas of 3 bits are no smaller than the experts of the checkpoint"
    ):
        replicas.on_base(3)
    assert (replicas.on_base(2).widths, replicas.on_base(2).at_full) == ([1], (2,))


def test_uses_by_other_text_are_nearer_to_the_layers_mean_in_the_same_order() -> None:
    """Layers keep their mean use; a layer that nothing used, and a width without replicas, stay as
    they are."""
    use = np.array([[[0.0], [1.0], [7.0]], [[0.0], [0.0], [0.0]]]) * [1.0, np.nan]
    expected = expected_use(use)
    assert expected.mean(axis=1)[:, 0] == pytest.approx([8 / 3, 0])
    assert 0 < expected[0, 0, 0] < 1 < expected[0, 1, 0] < 8 / 3 < expected[0, 2, 0] < 7
    assert (expected[0, 2, 0] / expected[0, 1, 0]) == pytest.approx(7**0.8, rel=0.05)
    assert np.isnan(expected[..., 1]).all()
