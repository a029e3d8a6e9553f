"""MoEpic's numbers against each other: what the link alone takes, by the paper's own loads and hit
rates."""

import numpy as np

from artifacts.modelshapes.known import MODELS
from moectl.show.render import Sheet
from tools.reproductions.judged import ruled_out
from tools.reproductions.moepic import figures as paper
from tools.reproductions.report import Claim

QWEN = "qwen1.5-moe-a2.7b"
_SHAPE = MODELS[QWEN].shape
_GIB = 2**30


def loads_a_token() -> int:
    """Experts that a token of Qwen1.5-MoE selects in all layers."""
    return _SHAPE.num_layers * _SHAPE.top_k


def load_ms() -> float:
    """Milliseconds to load one expert: section 2.2's of all that a token selects, over their
    number."""
    return paper.LOAD_MS / loads_a_token()


def hit_rate(num_experts: np.ndarray | float) -> np.ndarray | float:
    """Table 1's rate of LCP, straight lines between its sizes, 0 with none and 1 with all of a
    layer's experts."""
    sizes = [0, *paper.TABLE_1["lcp"], _SHAPE.num_experts]
    return np.interp(num_experts, sizes, [0.0, *paper.TABLE_1["lcp"].values(), 1.0])


def resident_share(budget: float) -> float:
    """Return the largest share of a token's expert bytes that are cached with `budget` experts a
    layer: theta H(C), theta = min(1, budget / C), at the best C."""
    sizes = np.arange(1, _SHAPE.num_experts + 1)
    return float((np.minimum(1, budget / sizes) * hit_rate(sizes)).max())


def link_bound_ms(budget: float) -> float:
    """Return the least milliseconds a token with `budget` experts a layer: bytes that are not
    cached cross the link, hidden or not."""
    return paper.LOAD_MS * (1 - resident_share(budget))


def experts_held(footprint_gb: float) -> float:
    """Return the experts a layer in a footprint of Figure 8, gigabytes taken as GiB, in the paper's
    favour.

    Two parts are subtracted: all that the whole model has besides experts, and a buffer of as many
    experts as a token selects in a layer.
    """
    besides = paper.WHOLE_GB - _SHAPE.nbytes / _GIB
    held = (footprint_gb - besides) * _GIB / _SHAPE.expert_nbytes - _SHAPE.top_k
    return held / _SHAPE.num_layers


def most_below_cache_only() -> float:
    """The most per cent that any split can save over Cache Only in Figure 4(b), even if that hides
    no load at all."""
    bound = link_bound_ms(paper.FIGURE_4B_EXPERTS / _SHAPE.num_layers)
    return 100 * (1 - bound / (paper.COMPUTE_MS + bound))


def prefill_bound_s() -> tuple[float, float]:
    """Return milliseconds per load and seconds of the missing loads, from Figure 7(a).

    The first is from the difference between Pre-gated MoE, which loads all experts, and
    Mixtral-offloading, which holds the budget. The second is the time at that rate for the experts
    that the budget does not hold.
    """
    seconds = paper.FIGURE_7A
    held = paper.FIGURE_7A_EXPERTS
    each_ms = 1e3 * (seconds["Pre-gated MoE"] - seconds["Mixtral-offloading"]) / held
    return each_ms, each_ms * (_SHAPE.num_keys - held) / 1e3


def slower_at_40() -> float:
    """Return the latency over the whole model's at a hit rate of 40 %, with loads of section 2.2,
    none of them hidden."""
    return (paper.COMPUTE_MS + 0.6 * paper.LOAD_MS) / paper.COMPUTE_MS


def _load_ms_for(slower: float) -> float:
    """Return the milliseconds of a load at which `slower_at_40` would be `slower`."""
    loads = 0.6 * paper.LOAD_MS / load_ms()
    return (slower - 1) * paper.COMPUTE_MS / loads


def claims() -> tuple[Claim, ...]:
    """Statements that do not follow from the paper's other numbers, with the arithmetic."""
    a_layer = paper.FIGURE_4B_EXPERTS / _SHAPE.num_layers
    bound = link_bound_ms(a_layer)
    each_ms, prefill_s = prefill_bound_s()
    held = experts_held(paper.FIGURE_8["MoEpic", 60])
    low, high = paper.FIGURE_4B_LOWER
    return (
        ruled_out(
            "Figure 2(b): times the latency of the whole model at a hit rate of 40 %",
            f"{paper.SLOWER_AT_40}",
            f"({paper.COMPUTE_MS:g} + .6 x {paper.LOAD_MS:g}) / {paper.COMPUTE_MS:g} = "
            f"{slower_at_40():.2f} at most, with the one load time of section 2.2; "
            f"{paper.SLOWER_AT_40} takes {_load_ms_for(paper.SLOWER_AT_40):.2f} ms a load, not "
            f"{load_ms():.2f}",
        ),
        ruled_out(
            "Figure 4(b): lower than Cache Only and Prefetch Only, 12 experts a layer",
            f"{low} to {high} %",
            f"Table 1 leaves {1 - resident_share(a_layer):.3f} x {paper.LOAD_MS:g} = {bound:.1f} "
            "ms on the link at best; Cache Only, nothing hidden, takes "
            f"{paper.COMPUTE_MS + bound:.1f}: {most_below_cache_only():.1f} % at most, with the "
            "load time of section 2.2",
        ),
        ruled_out(
            "Figure 7(a): MoEpic's first token, 480 experts",
            f"{paper.FIGURE_7A['MoEpic']} s",
            f"{_SHAPE.num_keys - paper.FIGURE_7A_EXPERTS} loads of {each_ms:.2f} ms (the rivals' "
            f"own) are {prefill_s:.2f} s",
        ),
        ruled_out(
            "Figure 8(a): MoEpic takes 60 ms a token in 12.38 GB",
            "60 ms",
            f"{held:.1f} experts a layer leave {1 - resident_share(held):.3f} x {paper.LOAD_MS:g} "
            f"= {link_bound_ms(held):.1f} ms on the link, with the load time of section 2.2",
        ),
    )


def sheet() -> Sheet:
    """Every published time of Qwen1.5-MoE whose budget is known, beside what the link alone
    takes."""
    rows = []
    for (system, target_ms), footprint in paper.FIGURE_8.items():
        held = experts_held(footprint)
        rows.append(
            (f"Figure 8(a), {system}, {footprint} GB", held, target_ms, link_bound_ms(held))
        )
    prefill = 1e3 * paper.FIGURE_7A["MoEpic"], 1e3 * prefill_bound_s()[1]
    rows.append(
        ("Figure 7(a), MoEpic, first token", paper.FIGURE_7A_EXPERTS / _SHAPE.num_layers, *prefill)
    )
    columns = ("where", "experts a layer", "paper", "link bound ms")
    return Sheet("Published ms beside what the link alone takes, Qwen1.5-MoE", columns, rows)
