"""Length of drafts: which drafter drafts how many tokens for the next pass, 0 included, from what
was accepted so far and from the seconds of passes by their width.

The choice is the one with the most expected tokens a second. What was not seen yet is expected to
go well and is therefore tried; what failed is forgotten by halves and tried again. Both are bounded
by an account of seconds: drafting may lose a small share of all time, and what it gained before.

Where requests share passes, acceptance is learned from all of them, and seconds apart by the number
of requests, in powers of two. The seconds of a request are its part of an undrafted pass; what a
pass with drafts takes above that is divided among its drafts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from runtime.drafters.base import MOST, DraftPart

_FIRST_PLAIN = 2  # passes without drafts, before which there is nothing to compare with
_LATE = 4.0  # times the expected seconds: a pass above waited for something else
_PLAIN_EVERY = 32  # passes of which at least one has no drafts: it keeps the comparison true


@dataclass(frozen=True, slots=True)
class DraftPrior:
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


@dataclass(slots=True)
class SharingCosts:
    """Seconds of passes that about as many requests share, as parts of a request: by its number of
    tokens, with the parts by their number of drafts, the passes since the last undrafted one, and
    what drafting gained."""

    by_width: list[Mean] = field(default_factory=lambda: [Mean() for _ in range(MOST + 2)])
    lengths: list[int] = field(default_factory=lambda: [0] * (MOST + 1))
    num_drafted: float = 0.0
    gained_s: float = 0.0


class MeasuredLengths:
    """The scheduler of the drafts of a session, whose `drafters` it knows by name. It is given
    seconds and reads no clock: the same inputs give the same choices."""

    def __init__(
        self,
        drafters: Sequence[str],
        expected: DraftPrior | None = None,
        *,
        draft: Mapping[str, float] | None = None,
    ) -> None:
        """`draft` has what is expected of a draft's seconds by drafter, in the place of one number
        for all."""
        self.expected = expected or DraftPrior()
        self._draft = dict.fromkeys(drafters, self.expected.draft) | dict(draft or {})
        # by width: how much longer than a plain pass, in those of one
        self._over = {
            width: max(self.expected.wide(width) - 1, 1e-3) for width in range(2, MOST + 2)
        }
        self.chosen = drafters[0]
        """The drafter whose drafts the next pass has."""
        self._seen = {name: Seen() for name in drafters}
        self._by_sharing: dict[int, SharingCosts] = {}
        self.share(1)

    def share(self, num_requests: int) -> None:
        """Choose for passes that so many requests share, from here on."""
        self._num_requests = num_requests
        self._costs = self._by_sharing.setdefault(num_requests.bit_length(), SharingCosts())

    def next(self) -> int:
        """Return the most drafts of the next pass, 0 for an undrafted one."""
        return max((length for _, length in self.plan()), default=0)

    def plan(self, most: int = MOST) -> list[tuple[str, int]]:
        """Return drafters, the best first, and how many tokens each drafts of at most `most`: the
        first that has any drafts is taken. Empty where a plain pass is the best."""
        if self._costs.lengths[0] < _FIRST_PLAIN or self._costs.num_drafted >= _PLAIN_EVERY:
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

    def note_pass(self, parts: Sequence[DraftPart], *, pass_s: float) -> None:
        """Learn from a pass of requests that were decoding, by the parts of those that had drafts,
        or of all where none had."""
        self.share(len(parts))
        drafted = [part for part in parts if part.num_drafted]
        part_s = pass_s / len(parts)
        plain_s = self._costs.by_width[1].value() if drafted else part_s
        total = sum(part.num_drafted for part in drafted) or 1
        for part in drafted or parts:
            over_s = len(parts) * (part_s - plain_s) * part.num_drafted / total
            self.chosen = part.name or self.chosen
            self.note(
                part.num_drafted,
                part.num_right,
                pass_s=max(plain_s + over_s, 0.0),
                draft_s=part.draft_s,
                weight=1 / len(drafted or parts),
            )

    def note(
        self,
        num_drafted: int,
        num_accepted: int,
        *,
        pass_s: float,
        draft_s: float,
        weight: float = 1.0,
    ) -> None:
        """Learn from a request's part of a pass, with drafts of the `chosen` drafter: how many were
        accepted, its seconds and those in which they were proposed. `weight` is the part's."""
        plain_s = self._costs.by_width[1].value()
        seconds = self._usual(num_drafted, pass_s)
        seen = self._seen[self.chosen]
        usual_s = self._draft_s(self.chosen, plain_s) * num_drafted or plain_s
        draft_s = min(draft_s, _LATE * usual_s)  # the first may have compiled its code
        for one in self._all_means():
            one.fade(0.5 ** (weight / self.expected.half_life))
        self._costs.by_width[num_drafted + 1].add(seconds, weight)
        self._costs.lengths[num_drafted] += 1
        self._costs.num_drafted = self._costs.num_drafted + weight if num_drafted else 0.0
        self._costs.gained_s += self.expected.share * seconds - draft_s
        if num_drafted:
            for place in range(min(num_accepted + 1, num_drafted)):
                seen.accepted[place].add(place < num_accepted)
            seen.draft_s.add(draft_s / num_drafted)
            self._costs.gained_s += (1 + num_accepted) * plain_s - seconds
        self._costs.gained_s = min(self._costs.gained_s, _PLAIN_EVERY * plain_s)

    def _usual(self, num_drafted: int, pass_s: float) -> float:
        """Return the seconds of a pass, without those that tell of something else."""
        expected = self.seconds()[num_drafted]
        if not expected or pass_s <= _LATE * expected:
            return pass_s
        # the first of a width may have compiled it
        return _LATE * expected if self._costs.lengths[num_drafted] else expected

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
        """Return the expected seconds of passes of 1, 2, ... tokens: of a width that was not seen
        those of the one before it and its share of the rise. The first step may be the dearest, as
        one token has code of its own in many places."""
        found = [self._costs.by_width[1].value()]
        rise = self._rise() * found[0]
        before = 0.0
        for width, over in self._over.items():
            expected = found[-1] + rise * (over - before)
            found.append(self._costs.by_width[width].value(expected, 1.0))
            before = over
        return found

    def receipt(self) -> dict[str, object]:
        """Return the passes of requests by their number of drafts, and the acceptance of each
        drafter by position lately."""
        lengths = map(sum, zip(*(one.lengths for one in self._by_sharing.values()), strict=True))
        return {
            "k": {str(length): num for length, num in enumerate(lengths) if num},
            "acceptance": {
                name: [round(one.value(), 3) for one in seen.accepted if one.weight]
                for name, seen in self._seen.items()
            },
        }

    def _rates(
        self, name: str, most: int, seconds: Sequence[float]
    ) -> Iterator[tuple[float, str, int]]:
        """Yield tokens a second of each length that the account allows, by the drafter's name."""
        plain_s, *wide_s = seconds
        allowed_s = self._costs.gained_s + (1 + self.expected.allowance) * plain_s
        draft_s = self._draft_s(name, plain_s)
        tokens = 1.0
        chance = 1.0
        for length, acceptance in enumerate(self.acceptance(name)[:most], 1):
            chance *= acceptance
            tokens += chance
            taken_s = wide_s[length - 1] + length * draft_s
            if taken_s <= allowed_s:
                yield tokens / taken_s, name, length

    def _draft_s(self, name: str, plain_s: float) -> float:
        """Return the expected seconds of one draft: each request is drafted for alone."""
        expected_s = self._draft[name] * plain_s * self._num_requests
        return self._seen[name].draft_s.value(expected_s, 1.0)

    def _rise(self) -> float:
        """Return how much steeper than expected the seconds of passes of several tokens rise."""
        plain_s = self._costs.by_width[1].value()
        widths = [width for width in self._over if self._costs.by_width[width].weight and plain_s]
        rise = Mean()
        for narrow, wide in pairwise(widths):
            own = [self._costs.by_width[width] for width in (narrow, wide)]
            rise_s = own[1].value() - own[0].value()
            share = self._over[wide] - self._over[narrow]
            rise.add(rise_s / plain_s / share, min(own[0].weight, own[1].weight))
        return max(rise.value(1.0, 1.0), 0.0)

    def _all_means(self) -> Iterator[Mean]:
        yield from self._costs.by_width
        for seen in self._seen.values():
            yield from seen.accepted
            yield seen.draft_s
