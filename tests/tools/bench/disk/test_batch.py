"""A batch from disk: what a process reports of each program."""

import pytest

from tests.conftest import Checkpoint
from tools.bench.disk.way import DEVICE_MAP, OURS, Way, measure_batch


@pytest.mark.parametrize(
    "way", [Way(DEVICE_MAP), Way(OURS, "2x", "disk", "exact")], ids=lambda way: way.name
)
def test_a_process_reports_the_time_of_a_whole_batch(checkpoint: Checkpoint, way: Way) -> None:
    """That every request got its answer is asserted there."""
    found = measure_batch(way, checkpoint("olmoe", "fused"), rows=3, tokens=2)
    assert found.seconds > 0 and found.read_nbytes >= 0
