"""Which come first: the experts of a step as they are met, keys by an eviction policy's sort keys."""

import numpy as np

_FEW = 4  # to be told one by one
_MOST = {np.dtype(float): np.inf, np.dtype(np.int64): np.iinfo(np.int64).max}


def distinct(selected: np.ndarray) -> list[int]:
    """Experts in order of first appearance, scanning tokens, then ranks; dropped ranks (-1) left out."""
    experts = dict.fromkeys(selected[0].tolist() if len(selected) == 1 else selected.ravel().tolist())
    experts.pop(-1, None)
    return list(experts)


def first_of(keys: np.ndarray, order: tuple[np.ndarray, ...], count: int) -> list[int]:
    """The `count` keys that come first by sort keys, the most significant first; among equals, as `keys` has them."""
    column, is_alone = order[0], len(order) == 1
    if is_alone and count <= min(_FEW, len(keys)) and (found := _least(column, count)):
        return [keys.item(at) for at in found]
    if count < len(keys):  # sort only what can be among them
        limit = column.min() if count == 1 else np.partition(column, count - 1)[count - 1]
        smallest = (column <= limit).nonzero()[0]
        keys, order = keys[smallest], [part[smallest] for part in order]
    first = order[0].argsort(kind="stable") if is_alone else np.lexsort(order[::-1])
    return keys[first[:count]].tolist()


def _least(column: np.ndarray, count: int) -> list[np.int64]:
    """Places of the `count` smallest, equals by the lower place, found one after another: of few that takes a fraction
    of a sort's time. Empty where it cannot tell: what was found is marked by the largest number there is."""
    if count == 1:
        return [column.argmin()]
    if (most := _MOST.get(column.dtype)) is None:
        return []
    rest, found = column.copy(), []
    for _ in range(count):
        at = rest.argmin()
        found.append(at)
        rest[at] = most
    return found if len(set(found)) == count else []
