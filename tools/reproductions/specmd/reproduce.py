"""SpecMD: collision misses at small budgets, and Least-Stale as the eviction policy of other
systems."""

from collections.abc import Iterator, Mapping

from artifacts.shape import FULL_BITS
from moectl.show.render import Sheet
from runtime.control.counters import hit_rate
from runtime.control.serving import Service
from runtime.replay.settings import Outcome, Setting
from runtime.replay.workload import Workload
from tools.reproductions.report import Claim, Reproduction
from tools.reproductions.specmd import figures as paper
from tools.reproductions.specmd.bench import (
    DIALS,
    FEW,
    LAYER_EXPERTS,
    LINK_GBPS,
    num_held,
    workload,
)
from tools.reproductions.specmd.claims import from_its_tables, not_measured

LEFT = "least_stale:within=left"
EVICTIONS = ("least_stale", LEFT, "lru", "lru:stamp=load", "score", "fld", "fld:distance=absolute")
CASES = (
    (4, 1),
    (4, 5),
    (16, 5),
)  # bits of an expert, and the budget in per cent of the bytes at 16 bits
_DROPPED = ("least_stale", LEFT)
DROPPED_IN = ("mixtral-offloading", "importance", "mixture-cache")
_FEW = FEW

_ASSUMED = (
    (
        f"virtual time on synthetic traces, {DIALS}: the statistics of the bundled model's "
        "routers, not of those four"
    ),
    "score prefetching of the next layer, one cache over all layers; collisions served one by "
    "one, as in the paper's framework, the time to the first token as a run here serves",
    "experts of 4 and of 16 bits in budgets of bytes at 16 bits: 5 % of OLMoE are 204 and 51 "
    "experts. The text does not say which the collisions are of; Table 2 is at 4 bits",
    (
        f"a link of {LINK_GBPS:g} GB/s; experts of 4 bits that it moves in a layer's time, by "
        "the paper's Table 1: "
    )
    + ", ".join(f"{name} {count:g}" for name, count in LAYER_EXPERTS.items()),
    "a collision is a miss on what was evicted earlier in the same pass, of all requests, prompts "
    "included; the text does not say what its rates are shares of",
    "a rate agrees whose range over the four models lies within half and twice the paper's, a "
    "ratio within half and twice, a size within 2 %",
    (
        "hobbit is left out of the first token's times: its lower precision of experts of 4 bits "
        "is not printed"
    ),
)

Outcomes = dict[tuple[str, int, int, str], Outcome]  # keys: shape, bits, budget, eviction
DropIns = list[
    tuple[str, str, Outcome, Outcome, Outcome]
]  # shape, preset, as published, Least-Stale in two orders


def reproduce() -> Reproduction:
    """Predict the figures; no parameter is fitted to the paper."""
    few, full = (
        {name: workload(name, bits) for name in LAYER_EXPERTS} for bits in (_FEW, FULL_BITS)
    )
    at = {_FEW: few, FULL_BITS: full}
    outcomes = {
        (name, bits, budget, eviction): at[bits][name].run(
            _setting(name, bits, budget, eviction, Service.ONE_BY_ONE)
        )
        for name in LAYER_EXPERTS
        for bits, budget in CASES
        for eviction in EVICTIONS
    }
    protected = {
        (name, _FEW, 5, eviction): few[name].run(_setting(name, _FEW, 5, eviction, Service.PINNED))
        for name in LAYER_EXPERTS
        for eviction in EVICTIONS
    }
    dropped = _dropped_in(few)
    return Reproduction(
        name="specmd",
        paper="SpecMD (Hoang et al., 2026, arXiv:2602.03921)",
        sheets={
            "collisions": _collisions("Collision misses, % of the requests (5.2)", outcomes, CASES),
            "protected": _collisions(
                "The same, a step pinned and proposals protected: as runs here",
                protected,
                ((4, 5),),
            ),
            "drop_in": _drop_in_sheet(dropped),
        },
        claims=(
            *from_its_tables(),
            *_of_collisions(outcomes),
            *_of_hits(outcomes),
            _of_times(dropped),
            *not_measured(),
        ),
        assumed=_ASSUMED,
    )


def _setting(name: str, bits: int, budget: int, eviction: str, serving: str) -> Setting:
    policies = {"eviction": eviction, "prefetch": "score"}
    held = f"{num_held(name, bits, budget)}x"
    return Setting(eviction, policies=policies, scope="global", budget=held, serving=serving)


def _dropped_in(workloads: Mapping[str, Workload]) -> DropIns:
    rows = []
    for name, one in workloads.items():
        common = {"scope": "global", "budget": f"{num_held(name, _FEW, 5)}x"}
        for preset in DROPPED_IN:
            as_is = one.run(Setting(preset, preset, **common))
            changed = [
                one.run(Setting(preset, preset, {"eviction": eviction}, **common))
                for eviction in _DROPPED
            ]
            rows.append((name, preset, as_is, *changed))
    return rows


def _rate(outcome: Outcome) -> float:
    """Collisions in per cent of the requests."""
    return 100 * outcome.counters["collisions"] / outcome.counters["requests"]


def _collisions(title: str, outcomes: Outcomes, cases: tuple[tuple[int, int], ...]) -> Sheet:
    rows = []
    for name in LAYER_EXPERTS:
        for bits, budget in cases:
            rates = [_rate(outcomes[name, bits, budget, eviction]) for eviction in EVICTIONS]
            hits = hit_rate(outcomes[name, bits, budget, "least_stale"].counters)
            rows.append((name, bits, budget, num_held(name, bits, budget), *rates, hits))
    columns = ("shape", "bits", "budget, %", "experts held", *EVICTIONS, "hit rate least_stale")
    return Sheet(title, columns, rows)


def _drop_in_sheet(dropped: DropIns) -> Sheet:
    rows = [
        (name, preset, paper.TABLE_2[name, preset][2])
        + tuple(_shorter(as_is, one) for one in changed)
        + tuple(hit_rate(one.counters) for one in (as_is, *changed))
        for name, preset, as_is, *changed in dropped
    ]
    columns = (
        "shape",
        "preset",
        "paper",
        "shorter by, %",
        f"by {LEFT}",
        "hit rate",
        "least_stale",
        LEFT,
    )
    return Sheet(
        "Time to the first token with Least-Stale dropped in at 5 %, experts of 4 bits (Table 2)",
        columns,
        rows,
    )


def _shorter(as_is: Outcome, changed: Outcome) -> float:
    return 100 * (1 - changed.times["ttft_ms"] / as_is.times["ttft_ms"])


def _of_collisions(outcomes: Outcomes) -> Iterator[Claim]:
    for bits in (_FEW, FULL_BITS):
        rates = {
            one: [_rate(outcomes[name, bits, 5, one]) for name in LAYER_EXPERTS]
            for one in paper.RATES
        }
        for eviction, (low, high) in paper.RATES.items():
            ours = rates[eviction]
            text = f"collision rate of {eviction}, 5 %, experts of {bits} bits (5.2, Figure 4)"
            holds = min(ours) >= low / 2 and max(ours) <= 2 * high
            yield Claim(
                text, f"{low:g} to {high:g} %", f"{min(ours):.1f} to {max(ours):.1f} %", holds
            )
        for eviction in ("lru", "score"):
            more = [
                other > own
                for other, own in zip(rates[eviction], rates["least_stale"], strict=True)
            ]
            text = f"Least-Stale collides less than {eviction}, 5 %, experts of {bits} bits (5.2)"
            yield Claim(text, "in all four", f"in {sum(more)} of {len(more)}", all(more))
    low, high = paper.LRU_RATIOS
    ours = [_times_lru(outcomes, name) for name in LAYER_EXPERTS]
    holds = min(ours) >= low / 2 and max(ours) <= 2 * high
    text = "lru's collisions over Least-Stale's at 5 % (5.2)"
    said = f"{min(ours):.1f} to {max(ours):.1f}"
    yield Claim(text, f"{low:g} to {high:g}", said, holds)


def _times_lru(outcomes: Outcomes, name: str) -> float:
    """Return the collisions with LRU over Least-Stale's, for experts of 4 bits at 5 %."""
    lru, own = (
        outcomes[name, _FEW, 5, one].counters["collisions"] for one in ("lru", "least_stale")
    )
    return lru / max(own, 1)


def _of_hits(outcomes: Outcomes) -> Iterator[Claim]:
    held = hit_rate(outcomes["olmoe-1b-7b", _FEW, 5, "least_stale"].counters)
    least = paper.HIT_RATE_OLMOE
    yield Claim(
        "hit rate of OLMoE at 5 % (abstract)", f"above {least:g}", f"{held:.3f}", held > least
    )
    ours = [hit_rate(outcomes[name, _FEW, 1, "least_stale"].counters) for name in LAYER_EXPERTS]
    low, high = paper.HIT_RATES_AT_1
    text = "hit rates with Least-Stale at 1 % (1)"
    yield Claim(
        text,
        f"{low:g} to {high:g}",
        f"{min(ours):.3f} to {max(ours):.3f}",
        low <= min(ours) <= max(ours),
    )


def _of_times(dropped: DropIns) -> Claim:
    printed = sum(paper.TABLE_2[name, preset][2] > 0 for name, preset, *_ in dropped)
    ours, by_left = (
        sum(_shorter(as_is, changed[place]) > 0 for _, _, as_is, *changed in dropped)
        for place in range(len(_DROPPED))
    )
    text = "Least-Stale in place of their own eviction shortens the first token (Table 2)"
    said = f"in {ours} of"
    said += f" {len(dropped)} ({by_left} by {LEFT})"
    return Claim(text, f"in {printed} of {len(dropped)}", said, ours >= printed)
