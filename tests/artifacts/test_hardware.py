"""The table of named machines."""

import pytest

from artifacts.errors import BadUsage
from artifacts.hardware import MACHINES, machine


def test_every_machine_has_positive_figures_and_a_source():
    for name, known in MACHINES.items():
        assert machine(name) is known
        assert min(known.fast_gbps, known.fast_tflops, known.link_gbps, known.link_latency_s, known.near_gbps) > 0
        assert known.fast_gbps > known.link_gbps
        assert known.source


def test_an_unknown_machine_is_answered_with_a_guess_and_the_known():
    with pytest.raises(
        BadUsage, match="unknown machine 'a100'; did you mean a100-pcie4.*Known: a100-pcie4, h100-pcie5"
    ):
        machine("a100")
