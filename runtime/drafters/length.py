"""Length of drafts: which drafter drafts how many tokens for the next pass, 0 included, from what
was accepted so far and from the seconds of passes by their width.

The choice is the one with the most expected tokens a second. What was not seen yet is expected to
go well and is therefore tried; what failed is forgotten by halves and tried again. Both are bounded
by an account of seconds: drafting may lose a small share of all time, and what it gained before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MOST = 8
_FIRST_PLAIN = 2  # passes without drafts, before which there is nothing to compare with
_LATE = 4.0  # times the expected seconds: a pass above waited for something else
_PLAIN_EVERY = 32  # passes of which at least one has no drafts: it keeps the comparison true


@dataclass(frozen=True, slots=True)
class Expected:
    """Expectations before anything was seen: a draft's acceptance, the seconds of one draft as a
    share of those of a plain pass, and the seconds of passes of 1, 2, ... tokens as shares of those
    of 1 (of a simulated or measured machine; the last rise goes on). `half_life` is in passes;
    `share` of all seconds, and `allowance` plain passes, is what drafting may lose."""

    acceptance: float = 0.7
    draft: float = 0.1
    widths: Sequence[float] = (1.0, 1.2)
    weight: float = 2.0  # of an expectation, in passes seen
    half_life: float = 64.0
    share: float = 0.015
    allowance: float = 1.0

    def wide(self, width: int) -> float:
        """Return the seconds of a pass of `width` tokens over those of a pass of one."""
        over = max(width - len(self.widths), 0)
        return self.widths[width - over - 1] + over * (self.widths[-1] - self.widths[-2])


@dataclass(frozen=True, slots=True)
class Passed:
    """One pass: its drafts and those that were accepted, and the seconds of drafting and of the
    pass."""

    drafter: str
    num_drafts: int
    num_accepted: int
    seconds: float
    draft_s: float = 0.0
    misses: int = 0


@dataclass(slots=True)
class Mean:
    """A mean whose older values count less."""

    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        self.weight += weight
        self.total += weight * value

    def fade(self, kept: float) -> None:
        self.weight *= kept
        self.total *= kept

    def value(self, expected: float = 0.0, weight: float = 0.0) -> float:
        """Return the mean, with an expectation that counts as `weight` values."""
        return (self.total + weight * expected) / ((self.weight + weight) or 1.0)


@dataclass(slots=True)
class Seen:
    """Results of one drafter: acceptance by position, and seconds of one draft."""

    accepted: list[Mean] = field(default_factory=lambda: [Mean() for _ in range(MOST)])
    draft_s: Mean = field(default_factory=Mean)


class Lengths:
    """The scheduler of the drafts of a session. It is given seconds and reads no clock: the same
    inputs give the same choices. `num_drafts` fixes the length; at 0 nothing is drafted."""

    def __init__(
        self,
        drafters: Sequence[str],
        *,
        num_drafts: int | None = None,
        most: int = MOST,
        expected: Expected | None = None,
    ) -> None:
        self.expected = expected or Expected()
        # by width: how much longer than a plain pass, in those of one
        self._over = {
            width: max(self.expected.wide(width) - 1, 1e-3) for width in range(2, MOST + 2)
        }
        self._fixed = num_drafts
        self._most = most
        self._seen = {name: Seen() for name in drafters}
        self._by_width = [Mean() for _ in range(MOST + 2)]
        self._misses = [Mean() for _ in range(MOST + 2)]
        self._lengths = [0] * (MOST + 1)  # passes by their number of drafts
        self._gained_s = 0.0
        self._num_drafted = 0  # passes since the last plain one

    def plan(self, most: int = MOST) -> list[tuple[str, int]]:
        """Return drafters, the best first, and how many tokens each drafts of at most `most`: the
        first that has any drafts is taken. Empty where a plain pass is the best."""
        most = min(most, self._most)
        if self._fixed is not None:
            return [(name, min(self._fixed, most)) for name in self._seen if self._fixed and most]
        if self._lengths[0] < _FIRST_PLAIN or self._num_drafted >= _PLAIN_EVERY:
            return []
        seconds = self.seconds()
        chosen = [
            max(self._rates(name, most, seconds), default=(0.0, name, 0)) for name in self._seen
        ]
        return [
            (name, length)
            for rate, name, length in sorted(chosen, reverse=True)
            if rate * seconds[0] > 1
        ]

    def note(self, passed: Passed) -> None:
        """Learn from a pass of a request that was decoding."""
        length = passed.num_drafts
        plain_s = self._by_width[1].value()
        seconds = self._usual(passed)
        for one in self._all_means():
            one.fade(0.5 ** (1 / self.expected.half_life))
        self._by_width[length + 1].add(seconds)
        self._misses[length + 1].add(passed.misses)
        self._lengths[length] += 1
        self._num_drafted = self._num_drafted + 1 if length else 0
        self._gained_s += self.expected.share * seconds
        if length:
            self._note_drafts(passed)
            self._gained_s += (1 + passed.num_accepted) * plain_s - seconds
        self._gained_s = min(self._gained_s - passed.draft_s, _PLAIN_EVERY * plain_s)

    def _usual(self, passed: Passed) -> float:
        """Return the seconds of a pass, without those that tell of something else."""
        expected = self.seconds()[passed.num_drafts]
        if not expected or passed.seconds <= _LATE * expected:
            return passed.seconds
        # the first of a width may have compiled it
        return _LATE * expected if self._lengths[passed.num_drafts] else expected

    def acceptance(self, drafter: str) -> list[float]:
        """Return the expected acceptance of each draft after those before it were accepted: before
        it was seen, that of the one before it."""
        found = []
        usual = self.expected.acceptance
        for one in self._seen[drafter].accepted:
            usual = one.value(usual, self.expected.weight)
            found.append(usual)
        return found

    def seconds(self) -> list[float]:
        """Return the expected seconds of passes of 1, 2, ... tokens."""
        plain_s = self._by_width[1].value()
        rise = self._rise() * plain_s
        return [plain_s] + [
            self._by_width[width].value(plain_s + rise * over, 1.0)
            for width, over in self._over.items()
        ]

    def receipt(self) -> dict[str, object]:
        """Return the passes by their number of drafts, what is expected of each drafter, and the
        seconds and misses of passes by width."""
        seen = [width for width in range(1, MOST + 2) if self._by_width[width].weight]
        return {
            "passes": {str(length): num for length, num in enumerate(self._lengths) if num},
            "acceptance": {
                name: [round(one.value(), 3) for one in seen.accepted if one.weight]
                for name, seen in self._seen.items()
            },
            "seconds": {str(width): self._by_width[width].value() for width in seen},
            "misses": {str(width): self._misses[width].value() for width in seen},
        }

    def _rates(
        self, name: str, most: int, seconds: Sequence[float]
    ) -> Iterator[tuple[float, str, int]]:
        """Yield tokens a second of each length that the account allows, by the drafter's name."""
        plain_s, *wide_s = seconds
        allowed_s = self._gained_s + (1 + self.expected.allowance) * plain_s
        draft_s = self._seen[name].draft_s.value(self.expected.draft * plain_s, 1.0)
        tokens = 1.0
        chance = 1.0
        for length, acceptance in enumerate(self.acceptance(name)[:most], 1):
            chance *= acceptance
            tokens += chance
            taken_s = wide_s[length - 1] + length * draft_s
            if taken_s <= allowed_s:
                yield tokens / taken_s, name, length

    def _rise(self) -> float:
        """Return how much steeper than expected the seconds of wide passes rise."""
        plain_s = self._by_width[1].value()
        rise = Mean()
        for width, over in self._over.items():
            seen = self._by_width[width]
            if seen.weight and plain_s:
                rise.add((seen.value() / plain_s - 1) / over, seen.weight)
        return max(rise.value(1.0, 1.0), 0.0)

    def _note_drafts(self, passed: Passed) -> None:
        seen = self._seen[passed.drafter]
        for place in range(min(passed.num_accepted + 1, passed.num_drafts)):
            seen.accepted[place].add(place < passed.num_accepted)
        seen.draft_s.add(passed.draft_s / passed.num_drafts)

    def _all_means(self) -> Iterator[Mean]:
        yield from self._by_width
        yield from self._misses
        for seen in self._seen.values():
            yield from seen.accepted
            yield seen.draft_s
