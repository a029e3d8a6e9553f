"""What a search for policies came to: answers, what stood beside them, what they are worth on other text."""

from collections.abc import Mapping
from dataclasses import dataclass

from artifacts.shape import Shape
from moectl.tune.request import Request
from profilers.compare.verify_search import CandidateQuality, MeasuredBeside
from runtime.policies.presets import presets
from runtime.search.results import Found, Tried
from runtime.search.space import Combination


@dataclass(frozen=True, slots=True)
class Pick:
    """One answer: as predicted, as verified. `name`: of the preset that it becomes."""

    name: str
    tried: Tried
    quality: CandidateQuality | None
    live: MeasuredBeside | None


@dataclass(frozen=True, slots=True)
class Check:
    """How much faster a pick is than the best published preset of as small a loss: on what it was tuned on, and on
    other text."""

    name: str
    other: str
    here: float
    there: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """All that is shown. `live`: everything that was measured beside each other, by name; `why`: where there is no
    lossy answer."""

    request: Request
    shape: Shape
    picks: list[Pick]
    found: Found
    live: Mapping[str, MeasuredBeside]
    qualities: Mapping[Combination, CandidateQuality]
    oracle_ms: float
    full_ms: float
    checks: list[Check]
    receipt: Mapping[str, object]
    run: int
    why: str = ""


def published_of_others(found: Found) -> dict[str, Tried]:
    """Presets that come from a paper, not from here."""
    return {name: one for name, one in found.published.items() if not presets()[name].paper.startswith("moectl")}
