"""The numbers in the text of the fMoE paper, each with its section and figure; what is only plotted
is left out."""

from dataclasses import dataclass

RIVALS = {
    "DeepSpeed-Inference": "on-demand",
    "Mixtral-Offloading": "mixtral-offloading",
    "MoE-Infinity": "moe-infinity",
    "ProMoE": "promoe",
}
"""The preset of each system that fMoE is compared with."""

BEST_RIVAL = "Mixtral-Offloading"  # has the most hits of the four, section 6.2
HIT_RATE = "hit rate higher by"
TTFT = "TTFT lower by"
TPOT = "TPOT lower by"


@dataclass(frozen=True, slots=True)
class PaperGain:
    """The paper's gain of fMoE over another system, the mean of its three models."""

    section: str
    figure: str
    against: str
    quantity: str
    share: float


def _rows(
    section: str, figure: str, quantity: str, percents: tuple[int, int, int, int]
) -> tuple[PaperGain, ...]:
    """`percents`: in the order in which the text names the systems."""
    named = ("DeepSpeed-Inference", "Mixtral-Offloading", "ProMoE", "MoE-Infinity")
    rows = zip(named, percents, strict=True)
    return tuple(
        PaperGain(section, figure, against, quantity, percent / 100) for against, percent in rows
    )


OVERALL = (
    *_rows("6.2", "9", HIT_RATE, (147, 11, 34, 63)),
    *_rows("6.2", "9", TTFT, (44, 35, 33, 30)),
    *_rows("6.2", "9", TPOT, (70, 61, 55, 48)),
)
SMALL_CACHE = _rows("6.4", "11", TPOT, (32, 24, 18, 18))
SMALL_CACHE_GB = 6

DISTANCE = 3  # section 6.6, Figure 13: latency is least there
CAPACITY = 1000  # maps, section 6.6, Figure 14a
MODELS = ("mixtral-8x7b", "qwen1.5-moe-a2.7b", "phi-3.5-moe")  # Table 1
# section 6.7, Figure 16: at most MOST_MAPS_MB megabytes for MOST_MAPS maps
MOST_MAPS = 32_000
MOST_MAPS_MB = 200
MACHINE = "rtx3090-pcie4"  # section 6.1; the paper has six of them
