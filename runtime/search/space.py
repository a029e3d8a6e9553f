"""The combinations of policies that a search may try: values by axis, and which of their products
make sense."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np

from artifacts.quantisation.widths import USUAL_WIDTHS
from runtime.policies import POLICIES
from runtime.policies.presets import Scope, is_lossless

PREFETCH = (
    "none",
    "next_gate",
    "next_gate:overfetch=1.5",
    "next_gate:distance=2",
    "next_gate:distance=2,overfetch=0.5,through=yes",
    "score",
    "frequency",
    "learned",
    "map:distance=2",
    "blend",
)
EVICTION = (
    "lru",
    "lfu",
    "lfu:decay=0.95",
    "lcp",
    "least_stale",
    "fld",
    "class_lru",
    "score",
    "score:decay=0.95",
    "horizon",
    "map",
)
_PLAIN = ("uniform", "allocated", "split", "split:theta=0.25", "split:prefer_solved=yes")
_LOSSY_ROUTING = tuple(
    f"cache_aware:strength={strength},keep={keep}" for strength in (0.1, 0.2) for keep in (1, 2)
)
_LOSSY_MISS = (
    "drop:rank=3",
    "drop:rank=2",
    "drop:rank=1,renormalise=yes,tolerance=0.005",
    "drop:rank=1,renormalise=yes,tolerance=0.02",
    "substitute",
    "substitute:tolerance=0.25",
    "substitute:rank=2",
    "substitute:rank=3",
    "buddy:keep=0.5",
    "buddy:rho=1",
    "fetch_priority",
    "fetch_lowest",
    "cascade",
)
_SHADOW = ("shadow", "shadow:margin=1", "shadow:margin=8", "shadow:half_life=16")
_HOT_BITS = ("hot:avg_bits=4", "hot:avg_bits=3", "hot:avg_bits=2")


class Combination(NamedTuple):
    """One policy of each axis as texts, and the scope."""

    routing: str = "standard"
    prefetch: str = "none"
    eviction: str = "lru"
    miss: str = "fetch"
    residency: str = "uniform"
    scope: str = str(Scope.LAYER)

    @property
    def policies(self) -> dict[str, str]:
        return {axis: getattr(self, axis) for axis in POLICIES}

    @property
    def family(self) -> tuple[str, str, str]:
        """Axes that decide most about quality: routing, what becomes of a miss, and residency."""
        return self.routing, self.miss, self.residency

    @property
    def is_lossless(self) -> bool:
        """True if the combination never alters the output, whatever the budget and text."""
        return is_lossless(self.routing, self.miss, self.residency)

    @property
    def without_slots(self) -> "Combination":
        """This combination, or, if it has replicas of all experts, the one that it becomes when
        they leave room for no slot: nothing moves then, and nothing has to be decided."""
        if not self.residency.startswith("shadow"):
            return self
        return Combination(self.routing, miss="shadow", residency=self.residency)


def lossless(ratio: float, tokens: float = inf) -> list[Combination]:
    """Return all combinations that give exactly the full model's output; `ratio` is the link's
    bandwidth over the near tier's, which computes `tokens` while it reads an expert."""
    shared = (f"qstar:ratio={times * ratio:.3g}{_near(tokens)}" for times in (1, 2))
    lending = (f"near:ratio={ratio:.3g}", *shared)
    behind = f"behind:ratio={ratio:.3g}{_near(tokens)}"
    miss = ("fetch", "near", *lending, behind, "cold")
    return list(_sensible(("standard",), miss, (*_PLAIN, "hot")))


def lossy(
    ratio: float, widths: Iterable[int] = USUAL_WIDTHS, tokens: float = inf
) -> list[Combination]:
    """Return combinations that may change the output; `widths` has the bits of stored replicas."""
    exact = ("fetch", "near", f"qstar:ratio={ratio:.3g}{_near(tokens)}")
    more = sorted({*widths} - {*USUAL_WIDTHS})
    every = (*USUAL_WIDTHS, *more)
    shadows = (
        "shadow",
        "shadow:bits=pruned",
        "shadow:slots=no",
        *(f"shadow:bits={bits}" for bits in every),
        *(f"shadow:bits={bits},slots=no" for bits in ("uniform", *every)),
    )
    miss = (*_LOSSY_MISS, *(f"fetch_priority:bits={bits}" for bits in more))
    return [
        *_sensible(_LOSSY_ROUTING, exact, ("uniform",)),
        *_sensible(("standard",), miss, ("uniform", "allocated")),
        *_sensible(("standard",), _SHADOW, shadows),
        *_sensible(("standard",), ("cold",), _HOT_BITS),
    ]


def _near(tokens: float) -> str:
    return "" if tokens == inf else f",tokens={tokens:.3g}"


def drawn(space: Sequence[Combination], count: int, *, seed: int) -> list[Combination]:
    """Return `count` combinations of a space, or all if there are fewer: a random one of each
    family in turn."""
    rng = np.random.default_rng(seed)
    families: dict[tuple, list[Combination]] = {}
    for index in rng.permutation(len(space)).tolist():
        families.setdefault(space[index].family, []).append(space[index])
    turns = max(map(len, families.values()), default=0)
    in_turn = (
        family[turn] for turn in range(turns) for family in families.values() if turn < len(family)
    )
    return [combination for combination, _ in zip(in_turn, range(count), strict=False)]


def neighbours(combination: Combination, space: Iterable[Combination]) -> list[Combination]:
    """Return the combinations of a space that differ on one axis; miss and residency count as one
    axis."""
    return [other for other in space if _distance(combination, other) == 1]


def _distance(one: Combination, other: Combination) -> int:
    changed = {axis for axis in Combination._fields if getattr(one, axis) != getattr(other, axis)}
    return len(changed) - ({"miss", "residency"} <= changed)


def _sensible(
    routing: Iterable[str], miss: Iterable[str], residency: Iterable[str]
) -> Iterator[Combination]:
    every = map(
        Combination._make, product(routing, PREFETCH, EVICTION, miss, residency, map(str, Scope))
    )
    return (combination for combination in every if _is_sensible(combination))


def _is_sensible(combination: Combination) -> bool:
    """Return whether a combination's parts go together, and it is not another combination under a
    longer name."""
    miss, residency, eviction = (
        text.partition(":")[0]
        for text in (combination.miss, combination.residency, combination.eviction)
    )
    is_global = combination.scope == Scope.GLOBAL
    if (miss == "shadow") != (residency == "shadow") or (miss == "cold") != (residency == "hot"):
        return False
    if residency in ("allocated", "hot") and is_global:  # they set each layer's capacity
        return False
    if residency == "split" and (miss != "fetch" or is_global):
        return False
    if eviction in ("fld", "least_stale") and not is_global:  # per layer they equal lru
        return False
    nothing_moves = "slots=no" in combination.residency
    return not nothing_moves or (combination.prefetch, combination.eviction, is_global, miss) == (
        "none",
        "lru",
        False,
        combination.miss,
    )
