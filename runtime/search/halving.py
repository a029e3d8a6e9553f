"""Successive halving: many candidates are tried on a little of a trace, the best of them on more."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from artifacts.errors import Problem

C = TypeVar("C", bound=Hashable)  # a candidate
R = TypeVar("R")  # what is known of it once tried

ETA = 3  # one in so many goes on, on so many times as much


@dataclass(slots=True)
class Trials(Generic[C, R]):
    """What is known of candidates by how much of the trace they were tried on, and why others could not be tried.

    `evaluate(candidates, amount)` gives a result or a Problem for each; `rank` gives what results are sorted by.
    """

    evaluate: Callable[[Sequence[C], int], Iterable[R | Problem]]
    rank: Callable[[R], tuple]
    results: dict[tuple[C, int], R] = field(default_factory=dict)
    refused: dict[C, str] = field(default_factory=dict)

    def best(self, candidates: Sequence[C], amount: int) -> list[C]:
        """Those that can be tried, tried on so much, the best first; equals in the order given."""
        new = [
            one for one in dict.fromkeys(candidates) if one not in self.refused and (one, amount) not in self.results
        ]
        for candidate, result in zip(new, self.evaluate(new, amount), strict=True):
            if isinstance(result, Problem):
                self.refused[candidate] = str(result)
            else:
                self.results[candidate, amount] = result
        found = [candidate for candidate in dict.fromkeys(candidates) if (candidate, amount) in self.results]
        return sorted(found, key=lambda candidate: self.rank(self.results[candidate, amount]))

    def tried_on(self, amount: int) -> dict[C, R]:
        """Results of the candidates that were tried on so much, in the order of their trials."""
        return {candidate: result for (candidate, tried), result in self.results.items() if tried == amount}


def one_by_one(evaluate: Callable[[C, int], R]) -> Callable[[Sequence[C], int], Iterable[R | Problem]]:
    """What tries many candidates, of what tries one and raises a Problem where it cannot be tried."""

    def each(candidates: Sequence[C], amount: int) -> Iterable[R | Problem]:
        for candidate in candidates:
            try:
                yield evaluate(candidate, amount)
            except Problem as problem:
                yield problem

    return each


def rungs(most: int, *, least: int) -> list[int]:
    """How much each round looks at: `most` in the last one, a third in the one before, and so on, never below
    `least`."""
    amounts = [most]
    while amounts[0] // ETA >= least:
        amounts.insert(0, amounts[0] // ETA)
    return amounts


def halve(trials: Trials[C, R], candidates: Sequence[C], amounts: Sequence[int], *, keep: int) -> list[C]:
    """The finalists, tried on the last amount, best first; at least `keep` of them go from round to round."""
    found = list(candidates)
    for number, amount in enumerate(amounts):
        found = trials.best(found, amount)
        if number + 1 < len(amounts):
            found = found[: max(keep, -(-len(found) // ETA))]
    return found


def climb(
    trials: Trials[C, R], start: C, around: Callable[[C], Sequence[C]], amounts: Sequence[int], *, most: int
) -> C:
    """From `start` to the best of its neighbours while that is better on the last amount, at most `most` of them
    looked at; those that look best on a shorter amount are tried on the last."""
    brief, whole = amounts[max(0, len(amounts) - 2)], amounts[-1]
    while most > 0:
        near = list(around(start))[:most]
        most -= len(near)
        promising = trials.best([start, *near], brief)[: 1 + len(near) // 8]
        best = trials.best([start, *promising], whole)[0]
        if best == start:
            break
        start = best
    return start
