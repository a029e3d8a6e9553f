"""Next use of each key of a trace: the future that Belady's rule and perfect prefetching use."""

from dataclasses import dataclass

import numpy as np

from artifacts.shape import Shape
from artifacts.traces.trace import Trace

NEVER = 2**62


@dataclass(frozen=True, slots=True, eq=False)
class NextUse:
    """Steps are numbered from 0 over the whole trace, in execution order. A key that is not wanted
    again has NEVER.

    For step s, `step_keys[s]` are the distinct keys that it wants, in order of first appearance,
    and `following[s]` the step in which each of them is wanted next.
    """

    first: np.ndarray  # [num_keys] int64: the step in which each key is wanted first
    step_keys: tuple[np.ndarray, ...]  # int64
    following: tuple[np.ndarray, ...]  # int64

    @classmethod
    def of(cls, trace: Trace, shape: Shape) -> "NextUse":
        """Scan a whole trace once, from its end."""
        steps = [_keys(step.experts) + step.layer * shape.num_experts for step in trace.steps()]
        upcoming = np.full(shape.num_keys, NEVER, np.int64)
        following = []
        for number in range(len(steps) - 1, -1, -1):
            following.append(upcoming[steps[number]])
            upcoming[steps[number]] = number
        return cls(upcoming, tuple(steps), tuple(reversed(following)))


def _keys(experts: np.ndarray) -> np.ndarray:
    return np.array(list(dict.fromkeys(experts.ravel().tolist())), np.int64)
