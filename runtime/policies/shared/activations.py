"""Expert activation matrices (MoE-Infinity, Xue et al., 2024): how many tokens of a request used
each expert, and which earlier request is most similar to those under way.

Shapes: L layers, E experts, C matrices kept.
"""

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from artifacts.traces.trace import PREFILL
from runtime.policies.base import Step

EPSILON = 1e-3  # added to shares, so that unused experts have a little


class Activations:
    """Counts the tokens of each request by expert. `current` [L, E] is the sum over the requests of
    the pass under way, of all their tokens so far."""

    def __init__(self, shape: Shape) -> None:
        # Imported late: numba takes long to load, and seconds when nothing is compiled yet.
        from runtime.policies.shared import activation_kernels

        self.kernels = activation_kernels
        self.current = np.zeros((shape.num_layers, shape.num_experts), np.int64)
        self._held: dict[int, np.ndarray] = {}  # by request, in the order in which they began
        self._over: set[int] = set()  # held requests that `follow` has returned
        self._of_pass: tuple[int, ...] = ()
        # [T] of each token's request in `_of_pass`, if that has several
        self._places: np.ndarray | None = None
        self._pass_index = -1
        self._num_prompts = 0

    def follow(self, step: Step) -> list[np.ndarray] | None:
        """Follow the requests of the step's pass. If they differ from those of the pass before,
        return the matrices of requests that seem over because they are not in the pass in which a
        new request begins; each is returned once."""
        if step.pass_index == self._pass_index:
            return None
        self._pass_index = step.pass_index
        names, self._places = self._requests(step)
        if names == self._of_pass:
            return None
        self._of_pass = names
        is_new = any(name not in self._held for name in names)
        over = (
            [name for name in self._held if name not in names and name not in self._over]
            if is_new
            else []
        )
        self._over.update(over)
        ended = [self._held[name] for name in over]
        of_pass = [self._held.setdefault(name, np.zeros_like(self.current)) for name in names]
        self.current = of_pass[0] if len(of_pass) == 1 else np.sum(of_pass, axis=0)
        if step.decodes:
            self._forget()
        return ended

    def count(self, step: Step) -> None:
        """Count the step's tokens."""
        self.kernels.count(np.array(step.selected, np.int64), self.current[step.layer])
        self._count_each(step)

    def weigh(self, step: Step, early: float, worth: np.ndarray) -> None:
        """Count the step's tokens, and set `worth` [E], the eviction priority of the layer's
        experts: `(share + epsilon) * early`."""
        self.kernels.weigh(
            np.array(step.selected, np.int64), self.current[step.layer], EPSILON, early, worth
        )
        self._count_each(step)

    def _requests(self, step: Step) -> tuple[tuple[int, ...], np.ndarray | None]:
        """Return the requests of a step, and the place of each token's request among them. Where
        they are not known, every prompt begins one."""
        if step.requests is None:
            self._num_prompts += step.phase == PREFILL
            return (-self._num_prompts,), None
        if len(step.requests) == 1:
            return (int(step.requests[0]),), None
        names, places = np.unique(step.requests, return_inverse=True)
        return tuple(names.tolist()), places if len(names) > 1 else None

    def _forget(self) -> None:
        """Drop requests that are not in a pass that decodes a newer one."""
        newest = max(map(list(self._held).index, self._of_pass))
        for name in list(self._held)[:newest]:
            if name not in self._of_pass:
                del self._held[name]
                self._over.discard(name)

    def _count_each(self, step: Step) -> None:
        """Count them by request; a single request's matrix is `current` itself."""
        if self._places is None:
            return
        kept = step.selected >= 0
        num_experts = self.current.shape[1]
        places = np.broadcast_to(self._places[:, None], kept.shape)[kept]
        counts = np.bincount(
            places * num_experts + step.selected[kept], minlength=len(self._of_pass) * num_experts
        )
        for name, of_request in zip(self._of_pass, counts.reshape(-1, num_experts), strict=True):
            self._held[name][step.layer] += of_request


class Collection:
    """At most `capacity` matrices of different kinds. When it is full, one of the two most similar
    matrices goes, the one that stands for fewer requests, and the other stands for both.

    Similarity: the mean over layers of the cosine of two rows; for a current request, over the
    layers that it has passed.
    """

    def __init__(self, capacity: int, shape: Shape) -> None:
        if capacity < 1:
            raise BadUsage(
                "a collection of activation matrices needs a capacity of at least 1, not "
                f"{capacity}"
            )
        self._capacity = capacity
        size = (capacity + 1, shape.num_layers, shape.num_experts)
        self._shares = np.zeros(size)
        self._unit = np.zeros(size)
        self._stands_for = np.zeros(capacity + 1, np.int64)
        self._followed = np.zeros(size[:2])  # cosines with the followed request, by layer
        self._alike = np.full((capacity + 1, capacity + 1), -np.inf)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, matrix: np.ndarray) -> None:
        """Add the matrix of a finished request, unless it used nothing."""
        if not matrix.any():
            return
        at = self._size
        similar = self._similar(matrix)
        self._put(at, matrix, similar)
        self._stands_for[at] = 1
        self._size = at + 1
        if self._size > self._capacity:
            self._join()

    def begin(self) -> None:
        """Follow other requests than so far."""
        self._followed[:] = 0

    def follow(self, layer: int, counts: np.ndarray) -> None:
        """Note the tokens [E] by expert of the followed request in one layer."""
        if self._size:
            used = counts.astype(np.float64)
            held = slice(self._size)
            self._followed[held, layer] = self._unit[held, layer] @ (
                used / max(np.sqrt(used @ used), 1)
            )

    def nearest(self) -> np.ndarray:
        """Return the shares [L, E] of the request most similar to the followed one, ties by the
        earlier; there must be one."""
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
        stays, goes = (
            (older, newer) if self._stands_for[older] >= self._stands_for[newer] else (newer, older)
        )
        self._stands_for[stays] += self._stands_for[goes]
        last = self._size - 1
        if goes != last:  # the last row takes its place
            similar = np.maximum(self._alike[last], self._alike[:, last])
            self._shares[goes], self._unit[goes] = self._shares[last], self._unit[last]
            self._stands_for[goes] = self._stands_for[last]
            self._alike[goes, :goes] = similar[:goes]
            self._alike[goes + 1 :, goes] = similar[goes + 1 :]
        self._alike[last] = -np.inf
        self._alike[:, last] = -np.inf
        self._size = last


def shares(matrix: np.ndarray) -> np.ndarray:
    """Return counts [..., E] as shares of their layer's sum."""
    return matrix / np.maximum(matrix.sum(axis=-1, keepdims=True), 1)


def _unit(counts: np.ndarray) -> np.ndarray:
    """Return counts [..., E] scaled to length 1; zeros stay zeros."""
    lengths = np.sqrt((counts.astype(np.float64) ** 2).sum(axis=-1, keepdims=True))
    return counts / np.maximum(lengths, 1)
