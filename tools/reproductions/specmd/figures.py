"""Figures of SpecMD (Hoang et al., 2026, arXiv:2602.03921) that its text and tables print."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """A row of Table 3: sizes at 16 bits, MB and GB of 2^20 and 2^30 bytes. `activated_gb` is what
    one pass needs."""

    expert_mb: float
    experts_gb: float
    other_gb: float
    activated_gb: float


TABLE_3 = {
    "olmoe-1b-7b": Sizes(12, 12.0, 0.89, 2.39),
    "mixtral-8x7b": Sizes(336, 84.0, 2.99, 23.99),
    "phi-3.5-moe": Sizes(150, 75.0, 2.99, 12.37),
    "qwen1.5-moe-a2.7b": Sizes(16.5, 23.2, 3.46, 5.01),
}

# Section 5.2, Figure 4: collisions in per cent at a capacity of 5 %, least and most over the
# models.
RATES = {"least_stale": (1.6, 1.9), "lru": (4.5, 12.6), "score": (42.6, 60.9)}
# Section 5.2: collisions over those of Least-Stale, at 5 %.
LRU_RATIOS = (2.6, 8.6)
SCORE_RATIOS = (58.0, 91.0)
FIGURE_8_RATIOS = (10.0, 34.0)  # of all others, at 1, 5 and 25 %
MOST_RATIO = 85.0  # abstract: LRU's over Least-Stale's, at 1 %
HIT_RATE_OLMOE = 0.88  # abstract, at 5 %
HIT_RATES_AT_1 = (0.88, 0.92)  # section 1

# Table 2, milliseconds to the first token: with the system's own eviction, with Least-Stale, and by
# how many per cent the second is shorter.
TABLE_2 = {
    ("olmoe-1b-7b", "mixtral-offloading"): (3076.8, 2748.1, 10.7),
    ("olmoe-1b-7b", "importance"): (2257.2, 1473.1, 34.7),
    ("olmoe-1b-7b", "hobbit"): (1590.1, 1309.2, 17.7),
    ("olmoe-1b-7b", "mixture-cache"): (2664.6, 2297.5, 13.8),
    ("mixtral-8x7b", "mixtral-offloading"): (4238.0, 3485.2, 17.8),
    ("mixtral-8x7b", "importance"): (1620.3, 1460.8, 9.8),
    ("mixtral-8x7b", "hobbit"): (2321.7, 1725.2, 25.7),
    ("mixtral-8x7b", "mixture-cache"): (4332.6, 3573.2, 17.5),
    ("phi-3.5-moe", "mixtral-offloading"): (4451.7, 3791.1, 14.8),
    ("phi-3.5-moe", "importance"): (1905.6, 1987.6, -4.3),
    ("phi-3.5-moe", "hobbit"): (3458.6, 1933.6, 44.1),
    ("phi-3.5-moe", "mixture-cache"): (5025.3, 3791.1, 24.6),
    ("qwen1.5-moe-a2.7b", "mixtral-offloading"): (3724.0, 3433.4, 7.8),
    ("qwen1.5-moe-a2.7b", "importance"): (2739.2, 2620.9, 4.3),
    ("qwen1.5-moe-a2.7b", "hobbit"): (2492.0, 2033.7, 18.4),
    ("qwen1.5-moe-a2.7b", "mixture-cache"): (3488.6, 2685.4, 23.0),
}
# Table 1: milliseconds to the first token and tokens/s, by shape and mix.
TABLE_1 = {
    "olmoe-1b-7b": {
        "8 bits": (3166, 1.5),
        "config 1": (3077, 1.91),
        "config 2": (2257, 1.22),
        "config 3": (1590, 1.34),
        "config 4": (2665, 2.33),
        "config 5": (2220, 1.69),
    },
    "mixtral-8x7b": {
        "8 bits": (10296, 0.4),
        "config 1": (4238, 0.98),
        "config 2": (1620, 0.75),
        "config 3": (2322, 0.71),
        "config 4": (4333, 1.07),
        "config 5": (3044, 1.42),
    },
    "phi-3.5-moe": {
        "8 bits": (7902, 0.8),
        "config 1": (4452, 1.69),
        "config 2": (1906, 0.86),
        "config 3": (3459, 1.05),
        "config 4": (5025, 1.72),
        "config 5": (3863, 1.11),
    },
    "qwen1.5-moe-a2.7b": {
        "8 bits": (5728, 2.3),
        "config 1": (3724, 2.89),
        "config 2": (2739, 1.11),
        "config 3": (2492, 2.19),
        "config 4": (3489, 3.50),
        "config 5": (2893, 2.11),
    },
}
# Figure 7, section 5.4: gains in speed of fetch-priority over fetch by shape and bits, and the part
# of gains that cache-aware routing is credited with, at the best strengths.
PRIORITY_GAINS = {("olmoe-1b-7b", 4): (0.2, 0.3), ("mixtral-8x7b", 8): (0.5, 0.6)}
ROUTING_PART = (0.1, 0.2)
STRENGTHS = (0.1, 0.5)
DEEPER = (8.0, 12.0)  # Figure 5, OLMoE at 1 %: collisions of LRU and score in deeper layers, %
MEAN_SHORTER = 17.0  # section 6, per cent
# section 5.2 and appendix D
SHORTER_5_2 = (14.8, 44.1)
SHORTER_D = (10.0, 44.0)

# Section 5.1 and Figure 1: cache sizes in GB of 2^30 bytes, by model and capacity in per cent.
CAPACITIES_GB = {("mixtral-8x7b", 1): 0.8, ("mixtral-8x7b", 25): 21.0, ("olmoe-1b-7b", 5): 0.6}
