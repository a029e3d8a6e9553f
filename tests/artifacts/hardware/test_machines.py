"""The table of named machines."""

import pytest

from artifacts.errors import BadUsage
from artifacts.hardware.machines import MACHINES, machine


def test_every_machine_has_positive_figures_and_a_source():
    for name, listed in MACHINES.items():
        assert machine(name) is listed
        assert min(listed.fast_gbps, listed.fast_tflops, listed.link_gbps, listed.link_latency_s, listed.near_gbps) > 0
        assert listed.fast_gbps > listed.link_gbps
        assert listed.source


def test_the_near_data_device_of_table_2():
    """64 units of 4 x 4 multiply-adds, one per cycle, at 1 GHz."""
    device = machine("h100-cxl-ndp")
    assert (device.near_gbps, device.near_tflops) == (512.0, pytest.approx(64 * 4 * 4 * 2 * 1e9 / 1e12))


def test_an_unknown_machine_is_answered_with_a_guess_and_the_known():
    with pytest.raises(
        BadUsage, match="unknown machine 'a100'; did you mean a100-pcie4.*Known: a100-pcie4, h100-pcie5"
    ):
        machine("a100")
