"""The name table of policies, and the parser of their options: `lru`, `next_gate:distance=2`,
`buddy:rho=2,otherwise=drop`.

Other packages add policies by an entry point of the group `moectl.policies`, named `AXIS.NAME`, or
by `register_policy`.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import partial
from math import inf
from types import UnionType
from typing import Any, get_args, get_type_hints

from artifacts.common.outside import installed, load
from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage
from artifacts.shape import FULL_BITS
from runtime.policies.base import Eviction, Miss, Prefetch, Residency, Routing
from runtime.policies.eviction.activation import ActivationEviction
from runtime.policies.eviction.belady import Belady
from runtime.policies.eviction.class_lru import ClassLru
from runtime.policies.eviction.fld import Fld
from runtime.policies.eviction.horizon import Horizon
from runtime.policies.eviction.late_horizon import LateHorizon
from runtime.policies.eviction.lcp import Lcp
from runtime.policies.eviction.least_stale import LeastStale
from runtime.policies.eviction.lfu import Lfu
from runtime.policies.eviction.lhu import Lhu
from runtime.policies.eviction.lru import Lru
from runtime.policies.eviction.map import MapEviction
from runtime.policies.eviction.random import Random
from runtime.policies.eviction.score import ScoreEviction
from runtime.policies.miss.behind import Behind
from runtime.policies.miss.buddy import Buddy
from runtime.policies.miss.cascade import Cascade
from runtime.policies.miss.cold import Cold
from runtime.policies.miss.controls.best_resident import BestResident
from runtime.policies.miss.controls.random_resident import RandomResident
from runtime.policies.miss.controls.zero import Zero
from runtime.policies.miss.drop import Drop
from runtime.policies.miss.fetch import Fetch
from runtime.policies.miss.fetch_lowest import FetchLowest
from runtime.policies.miss.fetch_priority import FetchPriority
from runtime.policies.miss.hybrid import Hybrid
from runtime.policies.miss.near import NearMiss
from runtime.policies.miss.qstar import QStar
from runtime.policies.miss.shadow import ShadowMiss
from runtime.policies.miss.share import Share
from runtime.policies.miss.substitute import Substitute
from runtime.policies.prefetch.activation import ActivationPrefetch
from runtime.policies.prefetch.affinity import Affinity
from runtime.policies.prefetch.blend import Blend
from runtime.policies.prefetch.draft import DraftPrefetch
from runtime.policies.prefetch.frequency import Frequency
from runtime.policies.prefetch.learned import LearnedPrefetch
from runtime.policies.prefetch.map import MapPrefetch
from runtime.policies.prefetch.next_gate import NextGate
from runtime.policies.prefetch.none import NoPrefetch
from runtime.policies.prefetch.oracle import Oracle
from runtime.policies.prefetch.popular import Popular
from runtime.policies.prefetch.random import RandomPrefetch
from runtime.policies.prefetch.score import ScorePrefetch
from runtime.policies.residency.adaptive import Adaptive
from runtime.policies.residency.allocated import Allocated
from runtime.policies.residency.hot import Hot
from runtime.policies.residency.shadow import ShadowResidency
from runtime.policies.residency.split import SplitResidency
from runtime.policies.residency.uniform import Uniform
from runtime.policies.routing.cache_aware import CacheAware
from runtime.policies.routing.pre_gated import PreGated
from runtime.policies.routing.pruned import Pruned
from runtime.policies.routing.standard import Standard
from runtime.policies.shared.maps import Matching

_GROUP = "moectl.policies"
POLICIES: dict[str, dict[str, type]] = {
    "routing": {
        "standard": Standard,
        "cache_aware": CacheAware,
        "pre_gated": PreGated,
        "pruned": Pruned,
    },
    "prefetch": {
        "none": NoPrefetch,
        "next_gate": NextGate,
        "draft": DraftPrefetch,
        "score": ScorePrefetch,
        "frequency": Frequency,
        "affinity": Affinity,
        "activation": ActivationPrefetch,
        "map": MapPrefetch,
        "popular": Popular,
        "random": RandomPrefetch,
        "learned": LearnedPrefetch,
        "blend": Blend,
        "oracle": Oracle,
    },
    "eviction": {
        "lru": Lru,
        "class_lru": ClassLru,
        "lfu": Lfu,
        "lcp": Lcp,
        "least_stale": LeastStale,
        "fld": Fld,
        "lhu": Lhu,
        "score": ScoreEviction,
        "horizon": Horizon,
        "late_horizon": LateHorizon,
        "map": MapEviction,
        "activation": ActivationEviction,
        "random": Random,
        "belady": Belady,
    },
    "miss": {
        "fetch": Fetch,
        "near": NearMiss,
        "qstar": QStar,
        "behind": Behind,
        "share": Share,
        "hybrid": Hybrid,
        "drop": Drop,
        "buddy": Buddy,
        "substitute": Substitute,
        "fetch_lowest": FetchLowest,
        "fetch_priority": FetchPriority,
        "cascade": Cascade,
        "cold": Cold,
        "shadow": ShadowMiss,
        "random_resident": RandomResident,
        "best_resident": BestResident,
        "zero": Zero,
    },
    "residency": {
        "uniform": Uniform,
        "allocated": Allocated,
        "hot": Hot,
        "adaptive": Adaptive,
        "shadow": ShadowResidency,
        "split": SplitResidency,
    },
}


@dataclass(frozen=True, slots=True)
class Policies:
    """One policy per axis."""

    routing: Routing
    prefetch: Prefetch
    eviction: Eviction
    miss: Miss
    residency: Residency

    @property
    def brings_ahead(self) -> bool:
        """True if any data comes over the link ahead of its use, without a step waiting for it."""
        return bool(self.prefetch.distance or self.residency.places or self.miss.loads_behind)

    def with_ratio(self, ratio: Callable[[], float]) -> "Policies":
        """Return the policies with the bandwidth of this machine's link over that of its near tier
        where their miss policy leaves that open. `ratio` is called only then: it may measure."""
        if not self.miss.ratio_is_open:
            return self
        return replace(self, miss=replace(self.miss, ratio=ratio()))

    @property
    def named_widths(self) -> set[int]:
        """Bits below full precision that a parameter names."""
        return {bits for axis in POLICIES for bits in getattr(self, axis).named_widths}

    @property
    def widths(self) -> list[int]:
        """Bits below full precision that the slow tier must hold; known once the policies are
        prepared."""
        return sorted(
            {bits for axis in POLICIES for bits in getattr(self, axis).widths} - {FULL_BITS}
        )

    @property
    def matching(self) -> Matching | None:
        """The matching of expert maps that the policies share; None if no policy matches maps.
        Known once they are prepared."""
        return next(
            (
                policy.matching
                for policy in (self.prefetch, self.eviction)
                if "maps" in policy.requires
            ),
            None,
        )

    @property
    def requires(self) -> frozenset[str]:
        return frozenset().union(*(getattr(self, axis).requires for axis in POLICIES))

    @property
    def wants(self) -> frozenset[str]:
        return frozenset().union(*(getattr(self, axis).wants for axis in POLICIES))

    @property
    def fallbacks(self) -> list[str]:
        """Notes on the artefacts that the policies do without; known once they are prepared."""
        return [note for axis in POLICIES for note in getattr(self, axis).fallbacks]


def register_policy(axis: str, name: str, policy: type) -> None:
    """Make a policy of another package known by a name, for texts, presets and benches.

    `policy` is a dataclass with the methods of its axis (runtime/policies/base.py) whose fields all
    have defaults. Raises BadUsage where it is not, and for a name that another policy has.
    """
    if axis not in POLICIES:
        raise BadUsage(unknown("axis", axis, POLICIES))
    if not name.isidentifier() or POLICIES[axis].get(name, policy) is not policy:
        raise BadUsage(f"{name!r} cannot be the name of a policy: it is taken, or not one word")
    if not is_dataclass(policy) or any(f.default is MISSING for f in fields(policy)):
        raise BadUsage(f"{policy.__name__} is no dataclass whose fields all have defaults")
    POLICIES[axis][name] = policy


def names(axis: str) -> list[str]:
    """Return the names of an axis, also those of other packages, which are not imported for it."""
    outside = (name.partition(".") for name in installed(_GROUP))
    return list(
        dict.fromkeys([*POLICIES[axis], *(name for own, _, name in outside if own == axis)])
    )


def find(axis: str, name: str) -> type:
    """Return the policy of a name. Raises BadUsage for an unknown one, and Incompatible where the
    package that has it cannot be used."""
    if name not in POLICIES[axis] and (entry := installed(_GROUP).get(f"{axis}.{name}")):
        load(f"{axis} policy {name}", entry, partial(register_policy, axis, name))
    if name not in POLICIES[axis]:
        raise BadUsage(unknown(f"{axis} policy", name, names(axis)))
    return POLICIES[axis][name]


def as_texts(policies: Mapping[str, Any]) -> dict[str, str]:
    """Return the policies by axis as texts. An object stands for its text; if its class has no name
    yet, it is registered under that of the class."""
    for axis, policy in policies.items():
        if not isinstance(policy, str) and type(policy) not in POLICIES.get(axis, {}).values():
            register_policy(axis, type(policy).__name__, type(policy))
    return {
        axis: policy if isinstance(policy, str) else describe(policy)
        for axis, policy in policies.items()
    }


def build(texts: dict[str, str]) -> Policies:
    """Build one policy per axis from its text."""
    return Policies(**{axis: parse(axis, texts[axis]) for axis in POLICIES})


def parse(axis: str, text: str) -> Any:
    """Parse `name` or `name:field=value,...` of one axis. Raises BadUsage for an unknown name,
    field or value; the message lists the known ones."""
    name, _, options = text.partition(":")
    policy = find(axis, name)
    return policy(**dict(_option(policy, name, option) for option in options.split(",") if option))


def describe(policy: Any) -> str:
    """Return the text that `parse` turns back into the same policy; parameters at their defaults
    are left out."""
    names = {cls: name for table in POLICIES.values() for name, cls in table.items()}
    changed = [
        f"{f.name}={getattr(policy, f.name)}"
        for f in fields(policy)
        if getattr(policy, f.name) != f.default
    ]
    return ":".join(filter(None, [names[type(policy)], ",".join(changed)]))


def _option(policy: type, name: str, option: str) -> tuple[str, Any]:
    field_name, _, value = option.partition("=")
    known = {f.name: f for f in fields(policy)}
    if field_name not in known:
        raise BadUsage(unknown(f"parameter of {name}", field_name, known))
    assert known[field_name].default is not MISSING, f"{name}.{field_name} has no default"
    return field_name, _convert(get_type_hints(policy)[field_name], value, f"{name}:{field_name}")


def _convert(kind: Any, value: str, where: str) -> Any:
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if type(None) in kinds and value == "None":
        return None
    wanted = next(k for k in kinds if k is not type(None))
    try:
        converted = _BOOLEANS[value.lower()] if wanted is bool else wanted(value)
        if converted != converted or wanted is not str and _MOST < abs(converted) < inf:
            raise ValueError(
                "NaN passes every comparison with a limit, and what is so large overflows"
            )
        return converted
    except (ValueError, KeyError):
        raise BadUsage(f"{where} takes a value of type {wanted.__name__}, not {value!r}") from None


_MOST = 2**53  # larger floats do not represent every integer
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
