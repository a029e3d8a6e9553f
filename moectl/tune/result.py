"""The result of a search for policies: picks, the presets measured beside them, and the check on
other text."""

from collections.abc import Mapping
from dataclasses import dataclass

from artifacts.shape import Shape
from moectl.tune.request import TuneRequest
from profilers.compare.verify_search import CandidateQuality, MeasuredBeside
from runtime.policies.presets import presets
from runtime.search.results import SearchResult, Tried
from runtime.search.space import Combination

ROUNDING = 1e-3  # nats; exact with whole experts, about 2e-4 with split ones in bfloat16
LEFT_OUT = "left out for want of time"  # a line of the receipt


@dataclass(frozen=True, slots=True)
class Pick:
    """One pick as predicted and as verified live; `name` is the preset that it becomes."""

    name: str
    tried: Tried
    quality: CandidateQuality | None
    live: MeasuredBeside | None


@dataclass(frozen=True, slots=True)
class Check:
    """Share of the time that a pick saves over the fastest published preset of no larger loss.

    `here` is on the trace of the search, `there` on the other one (the names are the keys in JSON).
    """

    name: str
    other: str
    here: float
    there: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """Everything that the command shows. `live` holds the presets that were measured side by side,
    by name; `why` says why there is no lossy pick."""

    request: TuneRequest
    shape: Shape
    picks: list[Pick]
    found: SearchResult
    live: Mapping[str, MeasuredBeside]
    qualities: Mapping[Combination, CandidateQuality]
    oracle_ms: float
    full_ms: float
    checks: list[Check]
    receipt: Mapping[str, object]
    run: int
    why: str = ""


def published_of_others(found: SearchResult) -> dict[str, Tried]:
    """Presets that come from a paper rather than from moectl."""
    return {
        name: one
        for name, one in found.published.items()
        if not presets()[name].paper.startswith("moectl")
    }
