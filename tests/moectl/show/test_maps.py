"""Sheets and heatmaps of expert maps, all together and one by one."""

import numpy as np
import pytest

from moectl.show.maps import maps

# 4 maps of 2 layers, each certain of another expert
CERTAIN = np.eye(4)[[0, 1, 2, 3]][:, None].repeat(2, axis=1)


def test_each_map_may_be_sure_where_all_together_know_nothing() -> None:
    sheet, heatmap = maps(CERTAIN, 1, None)
    assert [row[1:] for row in sheet.rows] == [pytest.approx((1.0, 0.0, 1.0))] * 2
    assert [row[1:] for row in maps(np.full((3, 2, 4), 0.25), 2, None)[0].rows] == [
        pytest.approx((1.0, 1.0, 0.5))
    ] * 2
    assert heatmap.values.tolist() == [[0.25] * 4] * 2


def test_one_layer_expert_by_expert() -> None:
    sheet, _ = maps(CERTAIN[:2], 1, 1)
    assert sheet.rows == [(0, 0.5, 1, 0.5), (1, 0.5, 1, 0.5), (2, 0, 0, 0), (3, 0, 0, 0)]


def test_a_single_expert_leaves_no_doubt() -> None:
    assert maps(np.ones((2, 1, 1)), 1, None)[0].rows == [(0, 0, 0, 1)]
