"""Published numbers of MoEpic (Yan et al., 2025, arXiv:2509.08342): the numbers of its text and
tables, each with its place.

Figures 2(c), 4(a), 6, 7(b) and 7(c) are pictures: this module has only what the text says of them.
"""

from collections.abc import Mapping

TITLE = "MoEpic (Yan et al., 2025, arXiv:2509.08342)"

# Table 1, section 3.3: hit rates by policy and experts cached a layer, Qwen1.5-MoE on MMLU.
TABLE_1: Mapping[str, Mapping[int, float]] = {
    "rnd": {10: 0.1641, 20: 0.3302, 30: 0.4969, 40: 0.6741, 50: 0.8315},
    "lfu": {10: 0.2436, 20: 0.4374, 30: 0.6068, 40: 0.7584, 50: 0.8934},
    "lru": {10: 0.1911, 20: 0.3888, 30: 0.5638, 40: 0.7316, 50: 0.8897},
    "lcp": {10: 0.2556, 20: 0.4536, 30: 0.6221, 40: 0.7712, 50: 0.9008},
}
LCP_ABOVE: Mapping[str, float] = {
    "rnd": 0.1252,
    "lru": 0.0153,
    "lfu": 0.0583,
}  # at 30, by the text of section 3.3

# Sections 1 and 2.2, Figure 2(d), the A6000: milliseconds a token of Qwen1.5-MoE.
LOAD_MS = 165.0
COMPUTE_MS = 57.0
# Figure 2(b), section 2.2: times the latency of the whole model in VRAM, at a hit rate of 40 %
SLOWER_AT_40 = 3.81

# Section 4.1: the budget V_e in experts over all layers; besides, a buffer of as many as a token
# selects in a layer.
DEFAULT_EXPERTS: Mapping[str, int] = {"qwen1.5-moe-a2.7b": 240, "mixtral-8x7b": 96}

# Figure 4(a), section 2.3: least and most hits of a layer, LFU with half of the experts.
FIGURE_4A = (0.5812, 0.6367)

# Figure 4(b), section 2.3: Qwen1.5-MoE, 12 experts a layer; theta 0 and theta 1 without prefetching
# are the baselines.
FIGURE_4B_EXPERTS = 288
FIGURE_4B_BEST = 0.4
FIGURE_4B_LOWER = (37.97, 48.67)  # per cent

# Figure 7(a), section 4.2: seconds to the first token, Qwen1.5-MoE.
FIGURE_7A_EXPERTS = 480
FIGURE_7A: Mapping[str, float] = {
    "MoEpic": 1.43,
    "Pre-gated MoE": 2.58,
    "Mixtral-offloading": 1.77,
    "AdapMoE": 1.78,
    "MoE-Infinity": 1.73,
}

# Figure 7(d), section 4.2: milliseconds a token, Mixtral-8x7B with experts at 2 bits. It is the one
# point behind the abstract's 37.51 to 65.73 %.
FIGURE_7D_EXPERTS = 160
FIGURE_7D: Mapping[str, float] = {
    "MoEpic": 85,
    "Pre-gated MoE": 248,
    "Mixtral-offloading": 162,
    "AdapMoE": 144,
    "MoE-Infinity": 136,
}

# Figure 8(a), section 4.3, Qwen1.5-MoE: gigabytes of peak memory, buffer and other weights
# included, with which a system reaches the given milliseconds a token; and the gigabytes of the
# whole model, which takes COMPUTE_MS.
FIGURE_8: Mapping[tuple[str, float], float] = {
    ("MoEpic", 140): 5.98,
    ("Mixtral-offloading", 140): 11.97,
    ("AdapMoE", 140): 10.42,
    ("MoE-Infinity", 140): 9.56,
    ("MoEpic", 60): 12.38,
}
WHOLE_GB = 26.67

# Table 3, section 4.4: milliseconds to the first token and a token, Mixtral-8x7B at the default
# budget. Without SP experts are prefetched at random, without LCP evicted at random, without CCA
# all layers have the same budget and theta 0.5.
TABLE_3: Mapping[str, tuple[float, float]] = {
    "MoEpic": (720, 132),
    "w/o SP": (753, 174),
    "w/o LCP": (782, 157),
    "w/o CCA": (864, 193),
}

# Figure 9, section 4.5, Mixtral-8x7B: the most that milliseconds a token vary over five settings of
# rho and omega, and by how many per cent zeta 0.05 is above zeta 0.01.
FIGURE_9A_MS = 8.0
FIGURE_9B_HIGHER = 12.12
