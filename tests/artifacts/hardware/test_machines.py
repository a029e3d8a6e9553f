"""The table of named machines."""

from dataclasses import replace

import pytest

from artifacts.errors import BadUsage
from artifacts.hardware import machines
from artifacts.hardware.machines import MACHINES, machine, machine_with


def test_every_machine_has_positive_figures_and_a_source():
    for name, listed in MACHINES.items():
        assert machine(name) is listed
        assert (
            min(
                listed.fast_gbps,
                listed.fast_tflops,
                listed.link_gbps,
                listed.link_latency_s,
                listed.near_gbps,
            )
            > 0
        )
        assert listed.fast_gbps > listed.link_gbps
        assert listed.source


def test_the_machine_of_table_2():
    """132 SMs, 989.4 Tflop/s and 80 GB of HBM3 are the SXM part, which reads 3.35 TB/s; the NDP
    device has 64 units of 4 x 4 multiply-adds, one per cycle, at 1 GHz."""
    device = machine("h100-cxl-ndp")
    assert (device.fast_gbps, device.fast_tflops, device.fast_gb) == (3350.0, 989.4, 80.0)
    assert (device.near_gbps, device.near_tflops) == (
        512.0,
        pytest.approx(64 * 4 * 4 * 2 * 1e9 / 1e12),
    )
    assert device.near_by_bits and device.near_gb == 512.0


def test_near_tiers_lose_what_the_link_reads_of_the_same_memory():
    """Two channels are shared by all; the 16 cores read less than their host's eight channels
    have."""
    assert machine("rtx3060-12gb").contention == pytest.approx(25 / 40)
    assert machine("rtx5090").contention == pytest.approx(50 / 70)
    assert machine("h100-16cores").contention == machine("a100").contention == 0
    assert replace(machine("rtx4090"), link_gbps=69.0).contention == 0.9


def test_the_link_may_be_left_out_of_a_name():
    assert machine("rtx4090") is machine("rtx4090-pcie4") and machine("h100") is machine(
        "h100-pcie5"
    )
    assert machine("m4-max").fast_gb == 96.0


def test_the_machine_of_a_gpu_as_its_driver_names_it():
    assert machine_with("NVIDIA H100 80GB HBM3").fast_gbps == 3350.0
    assert machine_with("NVIDIA GeForce RTX 4090 Laptop GPU") is None, (
        "another chip, with less memory"
    )
    assert all(machine_with(name).name == listed for name, listed in machines._GPUS.items())


def test_an_unknown_machine_is_answered_with_a_guess():
    with pytest.raises(BadUsage, match=r"unknown machine 'a10-pcie4'; did you mean a100-pcie4\?$"):
        machine("a10-pcie4")
