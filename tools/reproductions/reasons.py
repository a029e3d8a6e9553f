"""Reasons why our figures disagree with a paper's, as far as is known: shown with every
reproduction.

Each reason was found by a replay, by the paper's own numbers, or follows from what a reproduction
assumes.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason why the claims whose texts begin with one of `claims` disagree."""

    claims: tuple[str, ...]
    why: str


REASONS: Mapping[str, tuple[Reason, ...]] = {
    "moepic-table1": (
        Reason(
            ("order at 50", "lcp at 40", "lcp at 50", "lcp above lfu"),
            "the trace is synthetic, and the rates of LRU and LFU to which it is fitted do not "
            "determine that of LCP: its experts keep their popularity within a request, so that "
            "weighing counts by recency gains at most a third of what the paper has. A trace of "
            "the model would tell.",
        ),
    ),
    "moepic": (
        Reason(
            ("Figure 7(d)", "Figure 8(a)"),
            "how the rivals were run is not stated. The 162 ms of Mixtral-offloading are what "
            "loading on demand takes, with LRU and nothing overlapped (156 ms by replay), as if "
            "nothing useful were prefetched; here both rivals prefetch as they are described, and "
            "reach 140 ms with less memory.",
        ),
        Reason(
            ("Figure 4(b)",),
            "with Table 1's hit rates and the loads of section 2.2 the paper's own objective is "
            "lowest for whole experts at 12 a layer, far from 0.4.",
        ),
        Reason(
            ("Table 3: TPOT w/o SP",),
            (
                "random prefetches evict cached experts here; in the paper they go to a buffer "
                "beside the cache."
            ),
        ),
        Reason(
            ("Table 3: TTFT w/o LCP", "Table 3: TPOT w/o LCP"),
            "the trace of Mixtral is close to even and five of its eight experts a layer are "
            "held, so that it matters little which ones leave.",
        ),
        Reason(
            ("Table 3: TTFT w/o CCA", "Table 3: TPOT w/o CCA"),
            "layers of a synthetic trace are alike, so that dividing the budget among them gains "
            "nothing, and the even cut of one half is the fastest by replay: only the share of "
            "the link is left.",
        ),
    ),
    "specmd": (
        Reason(
            (
                "collision rate of least_stale, 5 %, experts of 4 bits",
                "collision rate of lru, 5 %, experts of 4 bits",
            ),
            "at 4 bits 5 % hold four times as many experts as at 16; in the shape of Qwen1.5-MoE "
            "that is three passes, in which hardly anything is evicted that the pass still wants, "
            "by any policy. The text does not say which bits its collisions are of.",
        ),
        Reason(
            (
                "collision rate of least_stale, 5 %, experts of 16 bits",
                "collision rate of lru, 5 %, experts of 16 bits",
                "collision rate of score, 5 %, experts of 16 bits",
                "Least-Stale collides less than lru, 5 %, experts of 16 bits",
            ),
            "prompts are counted too, of which one layer wants more experts than the cache holds; "
            "the text does not say what its rates are shares of. In Mixtral's shape the cache is "
            "smaller than two layers.",
        ),
        Reason(
            ("hit rates with Least-Stale at 1 %",),
            "1 % of the shapes are 10 to 40 experts of 4 bits, fewer than a layer's prompt wants, "
            "so that every policy loses what it has just loaded; a hit rate of 0.88 would need "
            "nearly all of a pass to be there.",
        ),
        Reason(
            ("Least-Stale in place of their own eviction",),
            "a run protects what a step wants and what was proposed, which is much of what "
            "Least-Stale is for, and stale experts of the layers ahead leave before current ones "
            "that this pass has passed. By `left`, which keeps the layers ahead, it shortens more "
            "of them (the table).",
        ),
    ),
    "buddymoe": (
        Reason(
            ("gain without rho", "gain of random", "gain of threshold"),
            "stand-ins spare nearly all loads on demand, and a spared load is spared time here. "
            "In the paper they are not free: its row with a random stand-in for every miss loads "
            "nothing, and still takes 25.2 ms a token at 0.75 and 30.2 ms at 0.5.",
        ),
        Reason(
            ("gain with rho 3",),
            "rho 3 over all layers spares at most three of a token's 15 to 23 loads at these "
            "shares; the paper's gain at 0.375 would take 1.26 ms for each, where the link moves "
            "an expert in 0.69 ms.",
        ),
    ),
    "context-aware": (
        Reason(
            ("mixtral-8x7b: decoding, 2 bits", "mixtral-8x7b: 2 bits over 3"),
            (
                "four of eight experts a layer are on the GPU, whose part of a token does not "
                "shrink with the bits."
            ),
        ),
    ),
    "fmoe": (
        Reason(
            ("Figure 9: all gains of the paper's size",),
            (
                "Mixtral-Offloading and MoE-Infinity prefetch beside compute here; in the paper "
                "they wait."
            ),
        ),
        Reason(
            ("Figure 12b",),
            "the probabilities of layers that have run say nothing of their next use, and most "
            "are near zero: weighed by them, what was used often leaves early. Weighing only the "
            "layers ahead, as moectl does, is the row of the table below that is named "
            "map:distance=3.",
        ),
        Reason(
            ("Figure 13: TPOT at d = 3",),
            "the link moves a quarter of an expert in a layer's time, so that what is prefetched "
            "further ahead comes in time more often: on this trace the best distance is 5; and "
            "nothing is charged for the search.",
        ),
    ),
}
