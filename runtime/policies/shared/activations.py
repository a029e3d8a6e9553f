"""Expert activation matrices (MoE-Infinity, Xue et al., 2024): how many tokens of a request used each expert, and which
earlier request is most similar to the current one.

Shapes: L layers, E experts, C matrices kept.
"""

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from artifacts.traces.trace import PREFILL
from runtime.policies.base import Step

EPSILON = 1e-3  # added to shares, so that unused experts have a little


class Activations:
    """`current` [L, E]: tokens of the current requests, since the last prefill began."""

    def __init__(self, shape: Shape) -> None:
        # Imported late: numba takes long to load, and seconds when nothing is compiled yet.
        from runtime.policies.shared import activation_kernels

        self.kernels = activation_kernels
        self.current = np.zeros((shape.num_layers, shape.num_experts), np.int64)
        self._prefill = -1

    def begins(self, step: Step) -> bool:
        """Whether new requests begin with this step."""
        return step.phase == PREFILL and step.pass_index != self._prefill

    def begin(self, step: Step) -> None:
        """Forget the current requests, which are over."""
        self._prefill = step.pass_index
        self.current = np.zeros_like(self.current)

    def count(self, step: Step) -> None:
        self.kernels.count(np.array(step.selected, np.int64), self.current[step.layer])

    def weigh(self, step: Step, early: float, worth: np.ndarray) -> None:
        """Count the step, and set `worth` [E], the eviction priority of the layer's experts: `(share + epsilon) *
        early`."""
        self.kernels.weigh(np.array(step.selected, np.int64), self.current[step.layer], EPSILON, early, worth)


class Collection:
    """At most `capacity` matrices of different kinds. When it is full, one of the two most similar matrices goes, the
    one that stands for fewer requests, and the other stands for both.

    Similarity: the mean over layers of the cosine of two rows; for a current request, over the layers that it has
    passed.
    """

    def __init__(self, capacity: int, shape: Shape) -> None:
        if capacity < 1:
            raise BadUsage(f"a collection of activation matrices needs a capacity of at least 1, not {capacity}")
        self._capacity = capacity
        size = (capacity + 1, shape.num_layers, shape.num_experts)
        self._shares, self._unit = np.zeros(size), np.zeros(size)
        self._stands_for = np.zeros(capacity + 1, np.int64)
        self._followed = np.zeros(size[:2])  # cosines with the followed request, by layer
        self._alike = np.full((capacity + 1, capacity + 1), -np.inf)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, matrix: np.ndarray) -> None:
        """Add the matrix of a finished request, unless it used nothing, and follow another request."""
        self._followed[:] = 0
        if not matrix.any():
            return
        at = self._size
        similar = self._similar(matrix)
        self._put(at, matrix, similar)
        self._stands_for[at], self._size = 1, at + 1
        if self._size > self._capacity:
            self._join()

    def follow(self, layer: int, counts: np.ndarray) -> None:
        """Note the tokens [E] by expert of the followed request in one layer."""
        if self._size:
            used, held = counts.astype(np.float64), slice(self._size)
            self._followed[held, layer] = self._unit[held, layer] @ (used / max(np.sqrt(used @ used), 1))

    def nearest(self) -> np.ndarray:
        """Return the shares [L, E] of the request most similar to the followed one, ties by the earlier; there must be
        one."""
        return self._shares[self._followed[: self._size].sum(axis=1).argmax()]

    def _similar(self, matrix: np.ndarray) -> np.ndarray:
        is_used = matrix.any(axis=1)
        return (self._unit[: self._size] * _unit(matrix)).sum(axis=(1, 2)) / is_used.sum()

    def _put(self, at: int, matrix: np.ndarray, similar: np.ndarray) -> None:
        self._shares[at] = shares(matrix)
        self._unit[at] = _unit(matrix)
        self._alike[at, :at] = similar

    def _join(self) -> None:
        newer, older = np.unravel_index(self._alike.argmax(), self._alike.shape)
        stays, goes = (older, newer) if self._stands_for[older] >= self._stands_for[newer] else (newer, older)
        self._stands_for[stays] += self._stands_for[goes]
        last = self._size - 1
        if goes != last:  # the last row takes its place
            similar = np.maximum(self._alike[last], self._alike[:, last])
            self._shares[goes], self._unit[goes] = self._shares[last], self._unit[last]
            self._stands_for[goes] = self._stands_for[last]
            self._alike[goes, :goes], self._alike[goes + 1 :, goes] = similar[:goes], similar[goes + 1 :]
        self._alike[last], self._alike[:, last] = -np.inf, -np.inf
        self._size = last


def shares(matrix: np.ndarray) -> np.ndarray:
    """Return counts [..., E] as shares of their layer's sum."""
    return matrix / np.maximum(matrix.sum(axis=-1, keepdims=True), 1)


def _unit(counts: np.ndarray) -> np.ndarray:
    """Return counts [..., E] scaled to length 1; zeros stay zeros."""
    lengths = np.sqrt((counts.astype(np.float64) ** 2).sum(axis=-1, keepdims=True))
    return counts / np.maximum(lengths, 1)
