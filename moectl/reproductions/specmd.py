"""SpecMD: collision misses at small budgets, and Least-Stale as the eviction policy of other systems."""

from collections.abc import Mapping

from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import MODELS
from artifacts.traces.synthetic import Dials, generate
from moectl.reproductions.report import UNKNOWN, Claim, Reproduction
from moectl.show.render import Sheet
from runtime.control.counters import hit_rate
from runtime.replay.settings import Outcome, Setting
from runtime.replay.workload import Workload

SHAPES = ("olmoe-1b-7b", "mixtral-8x7b", "deepseek-v2-lite", "qwen1.5-moe-a2.7b")
BUDGETS = ("1%", "5%", "25%")
EVICTIONS = ("lru", "lfu", "least_stale", "least_stale:within=ahead")
DROPPED_INTO = ("mixtral-offloading", "moe-infinity", "pre-gated")
# Found by `moectl fit-trace` for a trace of the bundled model on held-out text.
DIALS = Dials(skew=1.4, locality=0.0, similarity=0.94, predictability=0.8, tokens=80, requests=2, prompt=8)
_MACHINE = "a100-pcie4"

OutcomeTable = dict[tuple[str, str, str], Outcome]  # keys: shape, budget, eviction


def reproduce() -> Reproduction:
    """Predict the figures; no parameter is fitted to the paper."""
    workloads = {name: _workload(name) for name in SHAPES}
    outcomes = {
        (name, budget, eviction): workload.run(_setting(eviction, budget))
        for name, workload in workloads.items()
        for budget in BUDGETS
        for eviction in EVICTIONS
    }
    dropped = _dropped_in(workloads)
    return Reproduction(
        name="specmd",
        paper="SpecMD (Hoang et al., 2026, arXiv:2602.03921), Figures 4 and 8, Table 2",
        sheets={"collisions": _collisions(outcomes), "drop_in": _drop_in_sheet(dropped)},
        claims=_claims(outcomes, dropped),
        assumed=(
            f"synthetic traces, {DIALS}: the statistics of the bundled model's routers, not of those four",
            "which four models the figures show is not available here: these are four shapes of that range",
            "one cache over all layers; the next router predicts, and as many experts as a token selects may be "
            f"prefetched in a layer; {_MACHINE}",
            "a collision is a miss on what was evicted earlier in the same pass; prompts are counted too",
            "of the paper's figures only those of its abstract are available here",
        ),
    )


def _workload(name: str) -> Workload:
    model = MODELS[name]
    window = model.shape.top_k * model.shape.expert_nbytes
    return Workload(generate(DIALS, model.shape), model, machine(_MACHINE), window=window)


def _setting(eviction: str, budget: str) -> Setting:
    return Setting(eviction, policies={"eviction": eviction, "prefetch": "next_gate"}, scope="global", budget=budget)


def _dropped_in(workloads: Mapping[str, Workload]) -> list[tuple[str, str, Outcome, Outcome]]:
    """Shape, preset, its outcome as published, and its outcome with Least-Stale."""
    rows = []
    for name in SHAPES[:2]:
        for preset in DROPPED_INTO:
            as_is = workloads[name].run(Setting(preset, preset, scope="global", budget="5%"))
            policies = {"eviction": "least_stale"}
            changed = workloads[name].run(Setting(preset, preset, policies, scope="global", budget="5%"))
            rows.append((name, preset, as_is, changed))
    return rows


def _collisions(outcomes: OutcomeTable) -> Sheet:
    rows = [
        (name, budget, outcomes[name, budget, "lru"].num_slots, UNKNOWN)
        + tuple(outcomes[name, budget, eviction].counters["collisions"] for eviction in EVICTIONS)
        + tuple(hit_rate(outcomes[name, budget, eviction].counters) for eviction in EVICTIONS[:3])
        for name in SHAPES
        for budget in BUDGETS
    ]
    rates = tuple(f"hit rate {eviction}" for eviction in EVICTIONS[:3])
    columns = ("shape", "budget", "experts held", "paper", *EVICTIONS, *rates)
    return Sheet("Collision misses, ours", columns, rows)


def _drop_in_sheet(dropped: list[tuple[str, str, Outcome, Outcome]]) -> Sheet:
    rows = [
        (name, preset, UNKNOWN, hit_rate(as_is.counters), hit_rate(changed.counters))
        + (as_is.times["tokens_per_s"], changed.times["tokens_per_s"])
        for name, preset, as_is, changed in dropped
    ]
    columns = ("shape", "preset", "paper", "hit rate", "with least_stale", "tokens/s", "with least_stale (tokens/s)")
    return Sheet("Least-Stale dropped in at 5 %", columns, rows)


def _claims(outcomes: OutcomeTable, dropped: list[tuple[str, str, Outcome, Outcome]]) -> tuple[Claim, ...]:
    pairs = {key[:2]: _fewer(outcomes, *key[:2]) for key in outcomes}
    compared = [fewer for fewer in pairs.values() if fewer is not None]
    most = max(compared)
    ahead = sum(fewer > 1 for fewer in compared)
    held = hit_rate(outcomes["olmoe-1b-7b", "5%", "least_stale"].counters)
    better = sum(hit_rate(changed.counters) > hit_rate(as_is.counters) for *_, as_is, changed in dropped)
    return (
        Claim(
            "Least-Stale collides less than LRU",
            "yes",
            f"in {ahead} of {len(compared)} shapes and budgets",
            ahead == len(compared),
        ),
        Claim("at best, LRU's collisions over Least-Stale's", "up to 85", f"{most:.2f}", most > 10),
        Claim("hit rate of OLMoE at 5 %", "above 0.88", f"{held:.3f}", held > 0.88),
        Claim(
            "Least-Stale dropped in raises the hit rate",
            "yes",
            f"in {better} of {len(dropped)}",
            better == len(dropped),
        ),
    )


def _fewer(outcomes: OutcomeTable, name: str, budget: str) -> float | None:
    """Collisions of LRU over those of Least-Stale; None where neither has any."""
    lru, stale = (outcomes[name, budget, eviction].counters["collisions"] for eviction in ("lru", "least_stale"))
    return None if not lru and not stale else lru / max(stale, 1)
