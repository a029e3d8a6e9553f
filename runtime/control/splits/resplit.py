"""Solves the split of a run anew between its requests, from what the routers chose since it was
last solved.

The moment follows from counts of tokens and requests, so that a live run and a replay of its trace
lay out the fast tier alike. The new fast tier is empty: the next pass is a prompt, which wants most
experts anyway.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from artifacts.errors import BadInput, BadUsage
from artifacts.shape import Shape
from artifacts.splits.solve import SOLVERS
from runtime.control.recorder import Recorder
from runtime.control.splits.split_solver import curves_of, solved_anew
from runtime.policies import Policies
from runtime.policies.base import FastTier, Split, Step

EVERY = 5_000  # tokens
NOT_ANEW = "a split is solved anew on one device only: with several it stays as it is"


def tokens_between(
    asked: int | None, split: Split | None, policies: Policies, *, num_devices: int = 1
) -> int:
    """Return after how many tokens the split is solved anew; 0: never.

    By default a split that a solver found is solved anew when policies read predictions and there
    is one device: on several devices another split might not fit. Raises BadUsage when it is asked
    for and impossible.
    """
    solved = split.solved if split else None
    can_be = (
        solved is not None and solved.latencies is not None and policies.prefetch.reads_predictions
    )
    if asked and num_devices > 1:
        raise BadUsage(
            "--reconfigure-every lays slots out anew, on one device only: leave out --devices"
        )
    if asked is None:
        can_be = can_be and num_devices == 1
        return EVERY if can_be and solved.solver in SOLVERS else 0
    if asked < 0:
        raise BadUsage(f"--reconfigure-every takes a number of tokens, 0 for never, not {asked}")
    if asked and not can_be:
        raise BadUsage(
            "--reconfigure-every solves a split anew: give a preset or --residency that follows a "
            "solved one (run `moectl split`), and a --prefetch that reads predictions"
        )
    return asked


class Reconfiguration:
    """Observes the steps of a run that began with `split`, and calls `lay_out` with the new
    contents of the fast tier when the split changes."""

    def __init__(
        self,
        policies: Policies,
        shape: Shape,
        split: Split,
        *,
        every: int,
        lay_out: Callable[[FastTier], None],
    ) -> None:
        self.every = every
        self.num_solved = self.num_changed = self.num_untold = 0
        self._policies = policies
        self._shape = shape
        self._lay_out = lay_out
        self._split = split
        self._solved = split.solved
        if self._solved.solver not in SOLVERS:
            self._solved = replace(self._solved, solver=SOLVERS[-1])
        self._begin()

    def begin_pass(self, requests: np.ndarray) -> None:
        """Begin a pass; `requests` [T] is the request of each of its tokens."""
        self._num_tokens += len(requests)
        self._seen.begin_pass(requests)

    def add(self, step: Step) -> None:
        """Record a step; of its predictions only those of the next layer are needed."""
        columns = (step.pass_index, step.phase, step.layer, step.selected, step.weights)
        self._seen.add(Step(*columns, predicted=step.predicted[:, :1]))

    def settle(self, rejected: np.ndarray, in_vain: np.ndarray) -> None:
        """Leave out tokens that were read in vain; see `Recorder.settle`."""
        self._num_tokens -= int(in_vain.sum())
        self._seen.settle(rejected, in_vain)

    def between_requests(self) -> None:
        """Solve the split if enough tokens have been seen. Call it when no request is in
        progress."""
        if self._num_tokens < self.every:
            return
        seen = self._seen
        self._begin()
        try:
            self._solved = solved_anew(
                curves_of(seen.trace(), self._shape, self._policies.eviction),
                self._shape,
                self._solved,
            )
        except BadInput:  # a layer did not occur, so that its needs are unknown
            self.num_untold += 1
            return
        self.num_solved += 1
        fast = self._policies.residency.lay_out(self._solved)
        if not self._is_in_force(fast.split):
            self.num_changed += 1
            self._split = fast.split
            self._lay_out(fast)

    def receipt(self) -> dict[str, int]:
        """Return how often the split was solved, how often that changed it, and how often the steps
        seen were not enough."""
        counts = {
            "solved_anew": self.num_solved,
            "changed": self.num_changed,
            "could_not_tell": self.num_untold,
        }
        return {"every_tokens": self.every} | counts

    def _begin(self) -> None:
        self._seen = Recorder()
        self._num_tokens = 0

    def _is_in_force(self, split: Split) -> bool:
        names = ("top_neurons", "num_tops")
        same = all(
            np.array_equal(getattr(split, name), getattr(self._split, name)) for name in names
        )
        return same and split.num_bottoms == self._split.num_bottoms
