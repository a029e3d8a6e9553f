"""Orders keys by an eviction policy's sort keys."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np

from runtime.control.cache import RESIDENT, Cache
from runtime.policies.base import Eviction

_RESIDENT = np.uint8(RESIDENT)
_FEW = 4  # so few are found one after another
_BLOCK = 64  # keys that are looked at together
_MOST = {np.dtype(float): np.inf, np.dtype(np.int64): np.iinfo(np.int64).max}


def queues(eviction: Eviction, cache: Cache) -> Sequence[Iterable[int]]:
    """Return the policy's own order of its keys for each pool. Return nothing if the policy keeps
    none, or if the pools, except passing ones, are not one for each layer."""
    size = cache.shape.num_experts
    pools = [(pool.first, pool.stop) for pool in cache.pools if not pool.is_passing]
    layers = [(first, first + size) for first in range(0, cache.shape.num_keys, size)]
    return (eviction.queues() or ()) if pools == layers else ()


def first_of(keys: np.ndarray, order: tuple[np.ndarray, ...], count: int) -> list[int]:
    """Return the first `count` of `keys` by the sort keys in `order`, the most significant first;
    ties keep the order of `keys`."""
    column = order[0]
    is_alone = len(order) == 1
    if is_alone and count <= min(_FEW, len(keys)) and (places := _least(column, count)):
        return [keys.item(at) for at in places]
    if count < len(keys):  # sort only the keys that can be among them
        limit = column.min() if count == 1 else np.partition(column, count - 1)[count - 1]
        smallest = (column <= limit).nonzero()[0]
        keys = keys[smallest]
        order = [part[smallest] for part in order]
    first = order[0].argsort(kind="stable") if is_alone else np.lexsort(order[::-1])
    return keys[first[:count]].tolist()


def _least(column: np.ndarray, count: int) -> list[np.int64]:
    """Return the places of the `count` smallest values, ties by the lower place, found one after
    another, which for few takes a fraction of a sort's time.

    Returns an empty list when the data type has no value to mark a found place with, or when the
    values contain that mark.
    """
    if count == 1:
        return [column.argmin()]
    if (most := _MOST.get(column.dtype)) is None:
        return []
    rest = column.copy()
    places = []
    for _ in range(count):
        at = rest.argmin()
        places.append(at)
        rest[at] = most
    return places if len(set(places)) == count else []


@cache
def first_leaving() -> Callable[..., int]:
    """Return the compiled eviction order, for policies with ready sort keys; numba is imported by
    the first call."""
    from artifacts.common.numba_loops import kernel

    signature = (
        "int64(float64[::1], int64[::1], uint8[::1], boolean[::1], int64, int64, int64[::1])"
    )
    return kernel(signature, exact=True)(_first_leaving)


def _first_leaving(ranks, older, state, pinned, start, stop, victims):
    """Write to `victims` the first evictable keys (resident, not pinned) from `start` up to `stop`,
    as many as fit. The order is `ranks`, then `older`, then the key. Returns how many there are."""

    def leaves_before(key, other):
        """Return whether `key` is evicted before `other`, which has a lower number."""
        return ranks[key] < ranks[other] or (
            ranks[key] == ranks[other] and older[key] < older[other]
        )

    num_victims = 0
    most = np.inf
    may_leave = np.empty(_BLOCK, np.uint8)
    for first in range(start, stop, _BLOCK):
        size = min(_BLOCK, stop - first)
        num_found = 0
        rank = ranks[first : first + size]
        states = state[first : first + size]
        is_pinned = pinned[first : first + size]
        # Without a branch, which a processor would mispredict for every fourth key.
        for place in range(size):
            found = (states[place] == _RESIDENT) & (not is_pinned[place]) & (rank[place] <= most)
            may_leave[place] = found
            num_found += found
        if not num_found:
            continue
        for place in range(size):
            key = first + place
            if not may_leave[place] or (
                num_victims == len(victims) and not leaves_before(key, victims[-1])
            ):
                continue
            at = min(num_victims, len(victims) - 1)
            while at > 0 and leaves_before(key, victims[at - 1]):
                victims[at] = victims[at - 1]
                at -= 1
            victims[at] = key
            num_victims = min(num_victims + 1, len(victims))
            if num_victims == len(victims):
                most = ranks[victims[-1]]
    return num_victims
