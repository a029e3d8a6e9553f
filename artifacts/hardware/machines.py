"""Named machines: the bandwidths that decide whether to load an expert or to compute it near its memory."""

import math
from dataclasses import dataclass

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage

HERE = "here"  # the name of the machine that measures itself


@dataclass(frozen=True, slots=True)
class Machine:
    """Bandwidths in GB/s (1e9 bytes) of the fast tier's memory, of the link and of the near tier's memory.

    `fast_tflops` is the fast tier's peak in 16 bits without sparsity, `link_latency_s` the time of one transfer before
    its first byte arrives. `source` says where the figures come from. `near_by_bits`: weights of few bits save the near
    tier as much arithmetic as bytes. `fast_gb` and `near_gb` are capacities in GB (1e9 bytes), None where they vary.

    `load_s`, `layer_s` and `head_s` are seconds, where they are known better than from bandwidths: of one expert over
    the link, of one layer without its routed experts, and of the head.
    """

    name: str
    fast_gbps: float
    fast_tflops: float
    link_gbps: float
    link_latency_s: float
    near_gbps: float
    source: str
    near_tflops: float = math.inf  # unless given, the near tier is bound by its memory
    near_by_bits: bool = False
    fast_gb: float | None = None
    near_gb: float | None = None
    load_s: float | None = None
    layer_s: float | None = None
    head_s: float | None = None


_PCIE4 = "PCIe 4.0 x16: 32 GB/s nominal, about 25 in practice"
_PCIE5 = "PCIe 5.0 x16: 63 GB/s nominal, about 50 in practice"
_HOST4 = "near: 8 channels DDR4-3200, 205 GB/s nominal"
_HOST5 = "near: 8 channels DDR5-4800, 307 GB/s nominal, about 200 in practice"
_DESKTOP = "near: 4 channels DDR4-3200, 102 GB/s nominal"

_NDP = "near: CXL device of Table 2 of the context-aware paper, 512 GB/s, 64 units of 4 x 4 at 1 GHz, by bits"

_A100 = ("a100-pcie4", 1935.0, 312.0, 25.0, 10e-6, 150.0, f"A100 80GB PCIe data sheet, HBM2e; {_PCIE4}; {_HOST4}")
_H100 = ("h100-pcie5", 2000.0, 756.0, 50.0, 10e-6, 200.0, f"H100 PCIe data sheet, HBM2e; {_PCIE5}; {_HOST5}")
_H100_NDP = ("h100-cxl-ndp", 3350.0, 989.4, 25.0, 10e-6, 512.0, f"H100 SXM data sheet, HBM3; {_PCIE4}; {_NDP}")
_RTX3090 = ("rtx3090-pcie4", 936.0, 71.0, 25.0, 10e-6, 80.0, f"RTX 3090 data sheet, GDDR6X; {_PCIE4}; {_DESKTOP}")
_A6000 = ("a6000-pcie4", 768.0, 154.8, 25.0, 10e-6, 150.0, f"RTX A6000 data sheet, GDDR6; {_PCIE4}; {_HOST4}")
_5GBPS = ("5gbps", 768.0, 154.8, 5.0, 10e-6, 80.0, f"a link of 5 GB/s to a GPU as the RTX A6000; {_DESKTOP}")

MACHINES = {
    machine.name: machine
    for machine in (
        Machine(*_A100, fast_gb=80.0),
        Machine(*_H100, fast_gb=80.0),
        Machine(*_H100_NDP, near_tflops=2.048, near_by_bits=True, fast_gb=80.0, near_gb=512.0),
        Machine(*_RTX3090, fast_gb=24.0),
        Machine(*_A6000, fast_gb=48.0),
        Machine(*_5GBPS, fast_gb=48.0),
    )
}


def machine(name: str) -> Machine:
    """Return the machine of that name. Raises BadUsage with the known names."""
    if name not in MACHINES:
        raise BadUsage(unknown("machine", name, MACHINES))
    return MACHINES[name]
