"""Arrays in one block are views of it, in order."""

import numpy as np

from runtime.policies.shared.block import in_one_block


def test_what_is_written_to_a_view_is_in_the_block() -> None:
    given = np.arange(2.0), np.ones((2, 3), bool), np.zeros((0, 4)), np.array([7])
    block, views = in_one_block(*given)
    assert [view.tolist() for view in views] == [array.tolist() for array in given]
    views[1][1, 0] = 5
    views[3][0] = 6
    assert block.tolist() == [0, 1, 1, 1, 1, 5, 1, 1, 6]
    assert given[3].tolist() == [7], "the given arrays are copied"
