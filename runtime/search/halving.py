"""Successive halving: many candidates are tried on a little of a trace, the best of them on
more."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from artifacts.errors import Problem

C = TypeVar("C", bound=Hashable)  # a candidate
R = TypeVar("R")  # the result of trying it

ETA = 3  # a third of the candidates goes on, on three times as much of the trace


@dataclass(slots=True)
class Trials(Generic[C, R]):
    """Results of candidates by the amount of trace that they were tried on, and the reasons why
    others could not be tried.

    `evaluate(candidates, amount)` gives a result or a Problem for each candidate; results are
    sorted by `rank`. Before each `at_once` candidates (0: all of them) it is asked whether it
    `is_late`, and if so, the others stay untried.
    """

    evaluate: Callable[[Sequence[C], int], Iterable[R | Problem]]
    rank: Callable[[R], tuple]
    is_late: Callable[[], bool] = lambda: False
    at_once: int = 0
    num_untried: int = 0
    results: dict[tuple[C, int], R] = field(default_factory=dict)
    refused: dict[C, str] = field(default_factory=dict)

    def best(self, candidates: Sequence[C], amount: int, *, least: int = 0) -> list[C]:
        """Try the candidates on `amount`, `least` of them however late it is. Return the ones that
        could be tried, the best first, ties in the order given."""
        new = [
            candidate
            for candidate in dict.fromkeys(candidates)
            if candidate not in self.refused and (candidate, amount) not in self.results
        ]
        step = self.at_once or max(1, len(new))
        for start in range(0, len(new), step):
            if start >= least and self.is_late():
                self.num_untried += len(new) - start
                break
            self._try(new[start : start + step], amount)
        tried = [
            candidate
            for candidate in dict.fromkeys(candidates)
            if (candidate, amount) in self.results
        ]
        return sorted(tried, key=lambda candidate: self.rank(self.results[candidate, amount]))

    def _try(self, candidates: Sequence[C], amount: int) -> None:
        for candidate, result in zip(candidates, self.evaluate(candidates, amount), strict=True):
            if isinstance(result, Problem):
                self.refused[candidate] = str(result)
            else:
                self.results[candidate, amount] = result

    def tried_on(self, amount: int) -> dict[C, R]:
        """Return the results of all candidates that were tried on `amount`, in the order of their
        trials."""
        return {
            candidate: result
            for (candidate, tried), result in self.results.items()
            if tried == amount
        }


def one_by_one(
    evaluate: Callable[[C, int], R],
) -> Callable[[Sequence[C], int], Iterable[R | Problem]]:
    """Return a function that tries many candidates with `evaluate`, which tries one and raises a
    Problem when it cannot be tried."""

    def each(candidates: Sequence[C], amount: int) -> Iterable[R | Problem]:
        for candidate in candidates:
            try:
                yield evaluate(candidate, amount)
            except Problem as problem:
                yield problem

    return each


def rungs(most: int, *, least: int) -> list[int]:
    """Return the amounts of all rounds: `most` in the last one, a third of it in the one before,
    and so on, never below `least`."""
    amounts = [most]
    while amounts[0] // ETA >= least:
        amounts.insert(0, amounts[0] // ETA)
    return amounts


def halve(
    trials: Trials[C, R], candidates: Sequence[C], amounts: Sequence[int], *, keep: int
) -> list[C]:
    """Return the finalists, tried on the last amount, best first. At least `keep` candidates
    survive every round, and at least that many are tried however late it is."""
    survivors = list(candidates)
    for number, amount in enumerate(amounts):
        survivors = trials.best(survivors, amount, least=keep)
        if number + 1 < len(amounts):
            survivors = survivors[: max(keep, -(-len(survivors) // ETA))]
    return survivors


def climb(
    trials: Trials[C, R],
    start: C,
    around: Callable[[C], Sequence[C]],
    amounts: Sequence[int],
    *,
    most: int,
) -> C:
    """Move from `start` to its best neighbour while that is better on the last amount, trying at
    most `most` neighbours. Neighbours are tried on a shorter amount first, and only the best of
    them on the last."""
    brief = amounts[max(0, len(amounts) - 2)]
    whole = amounts[-1]
    while most > 0:
        near = list(around(start))[:most]
        most -= len(near)
        promising = trials.best([start, *near], brief)[: 1 + len(near) // 8]
        best = trials.best([start, *promising], whole)[0]
        if best == start:
            break
        start = best
    return start
