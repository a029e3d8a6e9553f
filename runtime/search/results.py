"""The plan of a search, the combinations it tried, and its result."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from artifacts.errors import Problem
from runtime.control.counters import is_exact
from runtime.search.halving import ETA, rungs
from runtime.search.space import Combination

# of the shortest and of the longest replay
LEAST_PASSES = 96
MOST_PASSES = 864


@dataclass(frozen=True, slots=True)
class LossScale:
    """Nats that a token loses per unit of squared error counted by `Damage`; None if not measured,
    and then no candidate with such an error has a predicted loss."""

    few_bits: float | None = None
    replaced: float | None = None


@dataclass(frozen=True, slots=True)
class Tried:
    """A combination as replayed. `loss`: predicted relative rise of perplexity, None without the
    tables for it; `altered`: requests that were not computed as by the full model."""

    combination: Combination
    ms: float
    loss: float | None
    exposed_ms: float
    near_ms: float
    fast_nbytes: int
    hit_rate: float
    damage: tuple[float, float]
    altered: int

    @property
    def is_lossless(self) -> bool:
        """True if the replay altered nothing. A predicted loss of 0 is no proof, as the table
        behind it may know of none."""
        return is_exact(self.altered)

    def beats(self, other: "Tried") -> bool:
        """Return whether it is at least as good as `other` in time, loss and memory, and better in
        one of them."""
        mine, theirs = ((tried.ms, tried.loss, tried.fast_nbytes) for tried in (self, other))
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True, slots=True)
class SearchTime:
    """Time limits of the searches of the two spaces: whether each has had its time, and how many
    candidates are replayed before that is asked again."""

    is_late: tuple[Callable[[], bool], Callable[[], bool]]
    at_once: int = 1


ReplayAll = Callable[[Sequence[Combination], int], Iterable[Tried | Problem]]


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """Size of a search: `candidates` of each of the two spaces, on up to `passes` of the trace, and
    `climbing` neighbours of the best."""

    candidates: int
    passes: int
    climbing: int
    seed: int
    max_loss: float

    @property
    def rungs(self) -> list[int]:
        return rungs(self.passes, least=LEAST_PASSES)

    @property
    def num_replays(self) -> int:
        """Approximate number of replays, over both spaces."""
        per_space = sum(-(-self.candidates // ETA**turn) for turn in range(len(self.rungs)))
        return 2 * (per_space + self.climbing)


@dataclass(slots=True)
class SearchResult:
    """The finalists of both spaces, best first, with published presets; and how many combinations
    were refused, by reason, and how many replays stayed `num_untried` for want of time."""

    lossless: list[Tried]
    lossy: list[Tried]
    published: dict[str, Tried]
    num_tried: int
    num_space: int
    num_replays: int
    refused: dict[str, int] = field(default_factory=dict)
    num_untried: int = 0

    def front(self) -> list[Tried]:
        """Return the combinations that no other beats in time, loss and memory together, by
        time."""
        priced = [tried for tried in (*self.lossless, *self.lossy) if tried.loss is not None]
        best = [tried for tried in priced if not any(other.beats(tried) for other in priced)]
        return sorted(
            {tried.combination: tried for tried in best}.values(), key=lambda tried: tried.ms
        )
