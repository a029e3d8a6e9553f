"""Named machines: the bandwidths that decide whether to load an expert or to compute it near its
memory."""

import math
import re
from dataclasses import dataclass

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage

HERE = "here"  # the name of the machine that measures itself


@dataclass(frozen=True, slots=True)
class Machine:
    """Bandwidths in GB/s (1e9 bytes) of the fast tier's memory, of the link and of the near tier's
    memory.

    `fast_tflops` is the fast tier's peak in 16 bits without sparsity, `link_latency_s` the time of
    one transfer before its first byte arrives. `source` says where the figures come from.
    `near_by_bits`: weights of few bits save the near tier as much arithmetic as bytes. `fast_gb`
    and `near_gb` are capacities in GB (1e9 bytes), None where they vary. `ram_gbps` is what link
    and near tier together get from the memory that both read, None where that is not known: then
    neither is counted as slower while the other reads.

    `is_unified`: CPU and GPU share one memory, and `link_gbps` is the SSD's, from which comes what
    does not fit.

    `load_s`, `layer_s` and `head_s` are seconds, where they are known better than from bandwidths:
    of one expert over the link, of one layer without its routed experts, and of the head.
    """

    name: str
    fast_gbps: float
    fast_tflops: float
    link_gbps: float
    link_latency_s: float
    near_gbps: float
    source: str
    near_tflops: float = math.inf  # unless given, the near tier is bound by its memory alone
    near_by_bits: bool = False
    fast_gb: float | None = None
    near_gb: float | None = None
    ram_gbps: float | None = None
    load_s: float | None = None
    layer_s: float | None = None
    head_s: float | None = None
    is_unified: bool = False

    @property
    def contention(self) -> float:
        """The part of the near tier's bandwidth that it loses while the link is busy, at most nine
        tenths: the link's engine reads first. 0 where it is not known."""
        left = self.near_gbps if self.ram_gbps is None else self.ram_gbps - self.link_gbps
        return min(0.9, max(0.0, 1 - left / self.near_gbps))


SSD_GBPS = 5.0
"""Of an NVMe SSD over PCIe 4.0 x4, 7 GB/s nominal, in practice."""

_PCIE4 = "PCIe 4.0 x16: 32 GB/s nominal, about 25 in practice"
_PCIE4_X8 = "PCIe 4.0 x8: 16 GB/s nominal, about 12.5 in practice"
_PCIE5 = "PCIe 5.0 x16: 63 GB/s nominal, about 50 in practice"
_PCIE5_X8 = "PCIe 5.0 x8: 31 GB/s nominal, about 25 in practice"
_LINKS_GBPS = {_PCIE4: 25.0, _PCIE4_X8: 12.5, _PCIE5: 50.0, _PCIE5_X8: 25.0}
_HOST4 = (
    "near: 8 channels DDR4-3200, 205 GB/s nominal; 32 cores of AVX2, 3 TFLOPS nominal, about 2 in "
    "practice"
)
_HOST5 = (
    "near: 8 channels DDR5-4800, 307 GB/s nominal, about 200 in practice; 32 cores of AVX-512, 5 "
    "TFLOPS nominal, about 3 in practice"
)
_DESKTOP = (
    "near: 4 channels DDR4-3200, 102 GB/s nominal; 16 cores of AVX2, 1.8 TFLOPS nominal, about 1 "
    "in practice"
)
_DESKTOP5 = (
    "near: 2 channels DDR5-5600, 90 GB/s nominal, about 70 in practice; 16 cores of AVX2, 2 "
    "TFLOPS nominal, about 1 in practice"
)

_DESKTOP4 = (
    "near: 2 channels DDR4-3200, 51 GB/s nominal, about 40 in practice; 8 cores of AVX2, 1 TFLOPS "
    "nominal, about 0.6 in practice"
)
_VIRTUAL16 = (
    "near: 16 cores of a Xeon of the Sapphire Rapids family, 94 GB/s read by all of them, of the 8 "
    "channels DDR5-4800 of its host, about 200 in practice; about 1.5 TFLOPS in practice"
)

_NDP = (
    "near: CXL device of Table 2 of the context-aware paper, 512 GB/s, 64 units of 4 x 4 at 1 "
    "GHz, by bits"
)
_ADA = "peak: an eighth of its AI TOPS, which are of 8 bits and sparse"
_BLACKWELL = "peak: a sixteenth of its AI TOPS, which are of 4 bits and sparse"
_MAC = (
    "technical specifications of the largest; three quarters of its unified memory for the model, "
    "no peak published; no link to a GPU: what does not fit is read from the SSD, 7.4 GB/s "
    "nominal (MacBook Pro of 2021), about 5 in practice; moectl computes on its CPU"
)
_UNIFIED = (
    "no link to a GPU: what does not fit is read from the SSD, PCIe 4.0 x4, 7 GB/s nominal, about "
    "5 in practice; moectl was never run on it"
)


def _card(
    name: str, fast_gbps: float, fast_tflops: float, fast_gb: float, link: str, sheet: str
) -> Machine:
    """Return a card in a desktop with two channels of DDR5; its name is that of the data sheet
    with the generation of the link."""
    return Machine(
        name,
        fast_gbps,
        fast_tflops,
        _LINKS_GBPS[link],
        10e-6,
        70.0,
        f"{sheet}; {link}; {_DESKTOP5}",
        near_tflops=1.0,
        fast_gb=fast_gb,
        ram_gbps=70.0,
    )


def _unified(
    name: str, fast_gbps: float, fast_gb: float, source: str, fast_tflops: float = math.inf
) -> Machine:
    """Return a machine whose GPU reads the CPU's memory."""
    return Machine(
        name,
        fast_gbps,
        fast_tflops,
        SSD_GBPS,
        100e-6,
        SSD_GBPS,
        source,
        fast_gb=fast_gb,
        is_unified=True,
    )


MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            "a100-pcie4",
            1935.0,
            312.0,
            25.0,
            10e-6,
            150.0,
            f"A100 80GB PCIe data sheet, HBM2e; {_PCIE4}; {_HOST4}",
            near_tflops=2.0,
            fast_gb=80.0,
        ),
        Machine(
            "h100-pcie5",
            2000.0,
            756.0,
            50.0,
            10e-6,
            200.0,
            f"H100 PCIe data sheet, HBM2e; {_PCIE5}; {_HOST5}",
            near_tflops=3.0,
            fast_gb=80.0,
        ),
        Machine(
            "h100-sxm-pcie5",
            3350.0,
            989.4,
            50.0,
            10e-6,
            200.0,
            f"H100 SXM data sheet, HBM3; {_PCIE5}; {_HOST5}",
            near_tflops=3.0,
            fast_gb=80.0,
        ),
        Machine(
            "h100-cxl-ndp",
            3350.0,
            989.4,
            25.0,
            10e-6,
            512.0,
            f"H100 SXM data sheet, HBM3; {_PCIE4}; {_NDP}",
            near_tflops=2.048,
            near_by_bits=True,
            fast_gb=80.0,
            near_gb=512.0,
        ),
        Machine(
            "h200-pcie5",
            4800.0,
            989.4,
            50.0,
            10e-6,
            200.0,
            f"H200 SXM data sheet, HBM3e; {_PCIE5}; {_HOST5}",
            near_tflops=3.0,
            fast_gb=141.0,
        ),
        Machine(
            "h100-16cores-pcie5",
            2700.0,
            989.4,
            54.0,
            5e-6,
            94.0,
            "measured: H100 80GB HBM3, copies in its memory, page-locked copies of 9 MiB over PCIe "
            f"5.0 x16; {_VIRTUAL16}",
            near_tflops=1.5,
            fast_gb=80.0,
            ram_gbps=200.0,
        ),
        Machine(
            "rtx3060-12gb-pcie4",
            360.0,
            25.5,
            25.0,
            10e-6,
            40.0,
            f"RTX 3060 12GB data sheet, GDDR6, peak: a quarter of its AI TOPS, which are of 16 "
            f"bits and sparse; {_PCIE4}; {_DESKTOP4}",
            near_tflops=0.6,
            fast_gb=12.0,
            ram_gbps=40.0,
        ),
        _card("rtx3080-pcie4", 760.0, 59.5, 10.0, _PCIE4, "RTX 3080 10GB data sheet, GDDR6X"),
        Machine(
            "rtx3090-pcie4",
            936.0,
            71.0,
            25.0,
            10e-6,
            80.0,
            f"RTX 3090 data sheet, GDDR6X; {_PCIE4}; {_DESKTOP}",
            near_tflops=1.0,
            fast_gb=24.0,
        ),
        *(
            _card(f"{name}-pcie4", gbps, tflops, gb, link, f"{sheet}, {_ADA}")
            for name, gbps, tflops, gb, link, sheet in (
                ("rtx4060", 272.0, 30.2, 8.0, _PCIE4_X8, "RTX 4060 data sheet, GDDR6"),
                (
                    "rtx4060ti-16gb",
                    288.0,
                    44.1,
                    16.0,
                    _PCIE4_X8,
                    "RTX 4060 Ti 16GB data sheet, GDDR6",
                ),
                ("rtx4070", 504.0, 58.2, 12.0, _PCIE4, "RTX 4070 data sheet, GDDR6X"),
                ("rtx4070ti-s", 672.0, 88.2, 16.0, _PCIE4, "RTX 4070 Ti SUPER data sheet, GDDR6X"),
                ("rtx4080", 717.0, 97.5, 16.0, _PCIE4, "RTX 4080 data sheet, GDDR6X"),
            )
        ),
        _card("rtx4090-pcie4", 1008.0, 165.2, 24.0, _PCIE4, "RTX 4090 data sheet, GDDR6X"),
        *(
            _card(
                f"{name}-pcie5", gbps, tflops, gb, link, f"{sheet} data sheet, GDDR7, {_BLACKWELL}"
            )
            for name, gbps, tflops, gb, link, sheet in (
                ("rtx5060ti-16gb", 448.0, 47.4, 16.0, _PCIE5_X8, "RTX 5060 Ti 16GB"),
                ("rtx5070", 672.0, 61.8, 12.0, _PCIE5, "RTX 5070"),
                ("rtx5070ti", 896.0, 87.9, 16.0, _PCIE5, "RTX 5070 Ti"),
                ("rtx5080", 960.0, 112.6, 16.0, _PCIE5, "RTX 5080"),
                ("rtx5090", 1792.0, 209.5, 32.0, _PCIE5, "RTX 5090"),
            )
        ),
        _card("7900xtx-pcie4", 960.0, 122.8, 24.0, _PCIE4, "RX 7900 XTX data sheet, GDDR6"),
        Machine(
            "a6000-pcie4",
            768.0,
            154.8,
            25.0,
            10e-6,
            150.0,
            f"RTX A6000 data sheet, GDDR6; {_PCIE4}; {_HOST4}",
            near_tflops=2.0,
            fast_gb=48.0,
        ),
        Machine(
            "5gbps",
            768.0,
            154.8,
            5.0,
            10e-6,
            80.0,
            f"a link of 5 GB/s to a GPU as the RTX A6000; {_DESKTOP}",
            near_tflops=1.0,
            fast_gb=48.0,
        ),
        _unified("m3-max", 400.0, 96.0, f"M3 Max {_MAC}"),
        _unified("m4-pro", 273.0, 48.0, f"M4 Pro {_MAC}"),
        _unified("m4-max", 546.0, 96.0, f"M4 Max {_MAC}"),
        _unified("m3-ultra", 819.0, 384.0, f"M3 Ultra {_MAC}"),
        _unified(
            "strix-halo",
            256.0,
            96.0,
            "Ryzen AI Max+ 395 data sheet, LPDDR5X-8000 of 256 bits; three quarters of its unified "
            f"memory for the model; {_UNIFIED}",
            59.4,
        ),
        _unified(
            "dgx-spark",
            273.0,
            120.0,
            "DGX Spark data sheet, LPDDR5X; 8 of its 128 GB of unified memory left for the system; "
            f"peak: a sixteenth of its AI TOPS, which are of 4 bits and sparse; {_UNIFIED}",
            62.5,
        ),
    )
}


def _short(name: str) -> str:
    """Return a name without its link, the letters of a maker and the B of GB, as 3060-12g."""
    return re.sub(r"^rtx|-pcie\d$|(?<=\dg)b(?=-|$)", "", name.lower())


_SHORT = {_short(name): name for name in MACHINES}

# By the name that its driver reports.
_GPUS = {
    "NVIDIA A100 80GB PCIe": "a100-pcie4",
    "NVIDIA H100 PCIe": "h100-pcie5",
    "NVIDIA H100 80GB HBM3": "h100-sxm-pcie5",
    "NVIDIA H200": "h200-pcie5",
    "NVIDIA GB10": "dgx-spark",
    "NVIDIA GeForce RTX 4060": "rtx4060-pcie4",
    "NVIDIA GeForce RTX 4060 Ti": "rtx4060ti-16gb-pcie4",
    "NVIDIA GeForce RTX 4070": "rtx4070-pcie4",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "rtx4070ti-s-pcie4",
    "NVIDIA GeForce RTX 4080": "rtx4080-pcie4",
    "NVIDIA GeForce RTX 5060 Ti": "rtx5060ti-16gb-pcie5",
    "NVIDIA GeForce RTX 5070": "rtx5070-pcie5",
    "NVIDIA GeForce RTX 5070 Ti": "rtx5070ti-pcie5",
    "NVIDIA GeForce RTX 5080": "rtx5080-pcie5",
    "NVIDIA GeForce RTX 3090": "rtx3090-pcie4",
    "NVIDIA GeForce RTX 4090": "rtx4090-pcie4",
    "NVIDIA GeForce RTX 5090": "rtx5090-pcie5",
    "NVIDIA RTX A6000": "a6000-pcie4",
}


def machine(name: str) -> Machine:
    """Return the machine of that name, which may leave out the link and the maker's letters, as
    rtx4090 or 4090. Raises BadUsage with the known names."""
    chosen = MACHINES.get(name) or MACHINES.get(_SHORT.get(_short(name), ""))
    if chosen is None:
        raise BadUsage(unknown("machine", name, MACHINES))
    return chosen


def machine_with(gpu: str) -> Machine | None:
    """Return the machine with this GPU, as its driver names it; None where its data sheet is not
    known here."""
    return MACHINES.get(_GPUS.get(gpu, ""))
