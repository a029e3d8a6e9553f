"""What each paper shows, in a sentence each, by the measured statements of its reproduction."""

from collections.abc import Mapping

SHOWN: Mapping[str, str] = {
    "MoEpic": (
        "on recorded routing of its own model the hit rates of Table 1 are found within 1.5 "
        "points, with nothing fitted, and LCP hits more often than LFU where many experts are "
        "held, by half of what is printed and up; split experts with next-router prefetching give "
        "a token the least time of all systems compared; that LCP, or dividing the budget among "
        "layers, shortens a token by itself as much as printed does not show on routing as even as "
        "Mixtral's here; and how far ahead of Mixtral-offloading and AdapMoE it is cannot be told, "
        "as how they were run is not printed."
    ),
    "SpecMD": (
        "Least-Stale has fewer collisions than LRU in all four shapes and on recorded routing of "
        "gpt-oss-20b, by about the factors of section 5.2, and brings the first token of systems "
        "that evict by recency sooner, by about half of what is printed; in place of eviction by "
        "score it does not where a step is pinned; the rates themselves cannot be told, as bits "
        "and shares are not printed, and the factors of 58 to 91 do not follow from its own rates."
    ),
    "BuddyMoE": (
        "co-activation is as concentrated, skewed and tighter in later layers as it says on "
        "recorded routing of gpt-oss-20b, less so on Mixtral's eight experts; a limited budget of "
        "stand-ins gains the printed throughput, which any stand-in gains that spares a load; "
        "without a limit more is gained here than printed; what buddies are worth in accuracy "
        "takes its model."
    ),
    "Context-aware GPU-NDP": (
        "the beginning of a request tells which experts the rest uses, on recorded routing of "
        "Mixtral-8x7B as closely as printed, and better than another request does; fewer bits "
        "speed up decoding as printed; the throughput over MoNDE cannot be told, as it depends on "
        "how often that swaps, and the accuracies take its model."
    ),
    "fMoE": (
        "maps of earlier requests that are found by meaning guide the first layers as it says, and "
        "with them it hits more often on requests that it has not seen than every published rival "
        "but ProMoE, whose predictors fitted to the small model do as well, by half of what is "
        "printed or less; in virtual time, over a link of a quarter of an expert a layer, its "
        "shorter latency is not told apart from that of its LFU cache without prefetching, and the "
        "threshold shows no effect; its search beside compute takes its GPUs."
    ),
}
