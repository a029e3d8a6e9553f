"""MoEpic's rivals of Figure 7(d) in two more ways: serial, each layer's loads before its experts,
and at the best published setting, found on other routing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from moectl.show.render import Sheet
from tools.reproductions.judged import by_seed, number
from tools.reproductions.moepic import figures as paper
from tools.reproductions.moepic.bench import SYSTEMS, Conditions, System
from tools.reproductions.report import Claim

MOEPIC = "MoEpic"
OTHER_SEED = 100  # of the trace that settings are found on
_GRID: Mapping[str, tuple[str, ...]] = {
    "Mixtral-offloading": ("none", "next_gate", "next_gate:overfetch=1.5"),
    "AdapMoE": ("none", "next_gate", "next_gate:overfetch=1.5"),
    "MoE-Infinity": ("none", "activation", "activation:distance=1,overfetch=1"),
}
_EVICTIONS = ("lru", "lfu", "lcp", "class_lru")


def serial() -> dict[str, System]:
    """Return the rivals that compute no expert while they load any."""
    return {f"{name}, serial": replace(SYSTEMS[name], is_serial=True) for name in _GRID}


def best(conditions: Conditions, experts: int) -> dict[str, System]:
    """Return each rival at the setting that takes least a token on a trace of another seed."""
    other = replace(conditions, dials=replace(conditions.dials, seed=OTHER_SEED))
    found = {}
    for name, ways in _GRID.items():
        settings = [
            replace(
                SYSTEMS[name], policies={**SYSTEMS[name].policies, "prefetch": p, "eviction": e}
            )
            for p, e in product(ways, _EVICTIONS)
        ]
        found[f"{name}, best"] = min(settings, key=lambda one: other.tpot_ms(one, experts))
    return found


def sheet(systems: Mapping[str, System], ms: Mapping[str, float]) -> Sheet:
    """Return milliseconds a token of every way that a rival is run in, of one seed."""
    rows = []
    for name, system in systems.items():
        policies = system.policies
        setting = ", ".join(filter(None, map(policies.get, ("prefetch", "eviction"))))
        rows.append((name, paper.FIGURE_7D[_rival(name)], setting or "its preset's", ms[name]))
    return Sheet(
        "Figure 7(d), compute 75 ms: rivals serial, and at their best",
        ("rival", "paper", "prefetch, eviction", "ours, TPOT ms"),
        rows,
        f"best: of a grid, the fastest on a trace of seed {OTHER_SEED}: "
        "`moectl simulate --reproduce moepic` finds it anew",
    )


def claims(
    names: Sequence[str], each: Sequence[Mapping[str, float]], off: str, points: float
) -> Iterator[Claim]:
    """Yield Figure 7(d)'s gains over these ways of running rivals; `off` names MoEpic switched
    off."""
    own = paper.FIGURE_7D[MOEPIC]
    for name in names:
        wanted = _lower(own, paper.FIGURE_7D[_rival(name)])
        yield by_seed(
            f"Figure 7(d): TPOT below {name}: by",
            f"{wanted:.1f} %",
            [_lower(ms[MOEPIC], ms[name]) for ms in each],
            off=f"MoEpic {off}",
            null=[_lower(ms[off], ms[name]) for ms in each],
            test=lambda ours, wanted=wanted: bool(abs(ours - wanted) <= points),
            form=number(".1f", " %"),
        )


def _rival(name: str) -> str:
    return name.partition(",")[0]


def _lower(ours: float, theirs: float) -> float:
    return 100 * (1 - ours / theirs)
