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
            ("lru at 10",),
            "the answers to GSM8K keep experts from token to token more than the paper's MMLU: so "
            "few experts are held that this is most of what LRU hits. Five of the 24 layers are "
            "recorded.",
        ),
        Reason(
            ("lcp above lfu at 10", "lcp above lfu at 20"),
            "with so few experts held an expert's last use is seldom as far back as omega, 128 "
            "tokens, and LCP counts as LFU does; the intervals end below half of the paper's gain. "
            "On answers to GSM8K: the paper's texts are of MMLU.",
        ),
    ),
    "moepic": (
        Reason(
            ("Figure 7(d)", "Figure 8(a)"),
            "how the rivals were run is not stated. Without any prefetching they come near the "
            "paper's times (the null tests of Figure 8(a) pass), as if nothing useful were "
            "prefetched; here both prefetch as they are described, and reach 140 ms with less "
            "memory.",
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
            "Mixtral's routing is close to even, so that it matters little which experts leave: on "
            "recorded routing, too, evicting at random loads 2 % more.",
        ),
        Reason(
            ("Table 3: TTFT w/o CCA", "Table 3: TPOT w/o CCA"),
            "layers of a synthetic trace are alike, so that dividing the budget among them gains "
            "nothing, and the even cut of one half is the fastest by replay: only the share of "
            "the link is left. Recorded layers are not much less alike: by hit rates an allocation "
            "saves 1 to 3 % of the loads there.",
        ),
    ),
    "specmd": (
        Reason(
            ("hit rates with Least-Stale at 1 %",),
            "1 % of the shapes are 10 to 40 experts of 4 bits, fewer than a layer's prompt wants, "
            "so that every policy loses what it has just loaded; a hit rate of 0.88 would need "
            "nearly all of a pass to be there.",
        ),
        Reason(
            tuple(
                f"{shape}, importance"
                for shape in ("olmoe-1b-7b", "mixtral-8x7b", "phi-3.5-moe", "qwen1.5-moe-a2.7b")
            ),
            "the preset evicts by score, which in a run that pins what a step wants seldom loses "
            "what it wants again; what importance keeps, Least-Stale does not know.",
        ),
        Reason(
            (
                "olmoe-1b-7b, mixtral-offloading",
                "mixtral-8x7b, mixtral-offloading",
                "phi-3.5-moe, mixture-cache",
            ),
            "the first token comes sooner, by less than half of the paper's gain: a run protects "
            "what a step wants and what was proposed, which is much of what Least-Stale is for.",
        ),
        Reason(
            ("Table 1: config", "Figure 7: fetch-priority"),
            "a link of 5 GB/s and the data sheet's compute leave a token's time to loads, where "
            "the paper's hooks and quantised kernels take 20 to 37 ms a layer (Table 1); Config 4 "
            "gains what it does not load.",
        ),
        Reason(
            ("Figure 7: cache-aware",),
            "an expert that is resident is not loaded, and one of fewer bits is: on these traces "
            "routing spares more than bits do.",
        ),
        Reason(
            ("Figure 5",),
            "1 % of OLMoE are 40 experts of 4 bits, fewer than the prompt wants in its second "
            "layer: that is where collisions are, whatever evicts; decoding has almost none.",
        ),
        Reason(
            ("Figure 6: score waits",),
            "what is prefetched and not used holds the link up before what is loaded on demand.",
        ),
        Reason(
            ("Figure 6: top-k predicts with a higher recall",),
            "above the 80th percentile of a layer's scores are 13 of 64 experts, 12 of 60, 3 of "
            "16, the top k among them: a recall that is lower cannot come of it, and over what the "
            "paper takes the percentile it does not say.",
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
            ("mixtral-8x7b-humaneval-gsm8k:",),
            "a layer of eight experts has few peers to choose from, and Mixtral was trained to use "
            "them evenly; the paper's figures are of a model with 64.",
        ),
    ),
    "context-aware": (
        Reason(
            ("mixtral-8x7b: decoding, 2 bits",),
            (
                "four of eight experts a layer are on the GPU, whose part of a token does not "
                "shrink with the bits."
            ),
        ),
    ),
    "fmoe": (
        Reason(
            (
                "Figure 9: more hits than DeepSpeed-Inference, at its best",
                "Figure 9: more hits than Mixtral-Offloading, at its best",
            ),
            "evicting by lfu already keeps most of what prefetching brings to a cache of lru, "
            "which the presets of these rivals have; beside next_gate with lfu maps gain nothing.",
        ),
        Reason(
            ("Figure 9: more hits than ProMoE", "section 6.2: of the others"),
            "ProMoE's predictors are fitted to the bundled model here, on its own training text, and "
            "guide a small model better than its next router does.",
        ),
        Reason(
            ("Figure 9: more hits than MoE-Infinity",),
            "what the systems hit depends on how well an activation matrix of earlier requests "
            "guides MoE-Infinity, and on the small bundled model it does well; against the other "
            "two the gain is half of the paper's.",
        ),
        Reason(
            ("Figure 9: lower T", "Figure 11: lower", "Figure 10"),
            "over this link, which moves a quarter of an expert in a layer's time, the cache is "
            "what counts: evicting by lfu without prefetching gains as much, so that the gain says "
            "nothing of maps. The rivals prefetch beside compute here; in the paper they wait.",
        ),
        Reason(
            ("Figure 12a: all others",),
            "random experts hit more often than hit count as well: three layers ahead it brings "
            "the same few experts, which are cached anyway.",
        ),
        Reason(
            ("gpt-oss-20b (bundled): lfu",),
            "in an answer an expert comes back soon after its last use (a "
            "token shares .45 of its experts with the one before), which recency sees and "
            "frequency does not.",
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
