"""MoEpic, Table 1: hit rates of eviction policies with 10 to 50 of 60 experts cached a layer."""

from artifacts.modelshapes.known import MODELS
from artifacts.traces.synthetic import Dials
from moectl.reproductions.report import Claim, Reproduction, known
from moectl.show.render import Sheet
from runtime.replay.fit_synthetic import HitRates, hit_rates

HELD = (10, 20, 30, 40, 50)
MODEL = "qwen1.5-moe-a2.7b"
# One column of the table, as quoted by a public summary of the paper.
PAPER = {"random": {30: 0.4969}, "lfu": {30: 0.6068}, "lru": {30: 0.5638}, "lcp": {30: 0.6221}}
FITTED = ("lru", "lfu")
# Found by `moectl fit-trace --hits lru:30=.5638 --hits lfu:30=.6068 --model qwen1.5-moe-a2.7b`.
DIALS = Dials(skew=0.4, locality=0.025, tokens=1200, requests=6, prompt=0)
_NUM_LAYERS = 2
_NEAR = 0.01


def reproduce() -> Reproduction:
    """LRU and LFU at 30 experts are fitted; LCP, random and all other columns are predictions."""
    wanted = [HitRates(policy, dict.fromkeys(HELD, 0.0)) for policy in (*PAPER, "belady")]
    reached = {row.eviction: row.rates for row in hit_rates(DIALS, MODELS[MODEL], wanted, num_layers=_NUM_LAYERS)}
    return Reproduction(
        name="moepic-table1",
        paper="MoEpic (Yan et al., 2025, arXiv:2509.08342), Table 1: hit rates, Qwen1.5-MoE",
        sheets={"hit_rates": _sheet(reached)},
        claims=_claims(reached),
        assumed=(
            f"a synthetic trace, {DIALS}, fitted to the paper's LRU and LFU at 30 experts and to nothing else",
            f"{_NUM_LAYERS} layers of {MODEL}'s 60 experts, 4 a token; layers of a synthetic trace are alike",
            "decoding from an empty cache, one expert a slot, no prefetching; lcp with rho 0.25 and omega 128",
            "of the paper's table only the column of 30 experts is available here, as a public summary quotes it",
        ),
    )


def _sheet(reached: dict[str, dict[int, float]]) -> Sheet:
    rows = []
    for policy, rates in reached.items():
        for held, ours in rates.items():
            paper = PAPER.get(policy, {}).get(held)
            role = "bound" if policy == "belady" else "fitted" if policy in FITTED and paper else "predicted"
            difference = None if paper is None else ours - paper
            shown = None if role == "bound" else known(paper)  # the paper's table has no such row
            rows.append((policy, held, shown, ours, difference, role))
    return Sheet("Hit rates", ("policy", "experts held", "paper", "ours", "difference", "ours is"), rows)


def _claims(reached: dict[str, dict[int, float]]) -> tuple[Claim, ...]:
    ours = {policy: rates[30] for policy, rates in reached.items()}
    published, order = (" < ".join(sorted(PAPER, key=key)) for key in (lambda name: PAPER[name][30], ours.__getitem__))
    claims = [Claim("order at 30", published, order, order == published)]
    for policy in ("lcp", "random"):
        paper = PAPER[policy][30]
        is_near = abs(ours[policy] - paper) <= _NEAR
        claims.append(Claim(f"{policy} at 30, predicted", f"{paper:.4f}", f"{ours[policy]:.4f}", is_near))
    paper_gain, our_gain = PAPER["lcp"][30] - PAPER["lfu"][30], ours["lcp"] - ours["lfu"]
    claims.append(Claim("lcp above lfu at 30", f"{paper_gain:+.4f}", f"{our_gain:+.4f}", our_gain > _NEAR))
    return tuple(claims)
