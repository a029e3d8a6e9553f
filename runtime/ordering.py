"""Which come first: the experts of a step as they are met, keys by an eviction policy's sort keys."""

import numpy as np


def distinct(selected: np.ndarray) -> list[int]:
    """Experts in order of first appearance, scanning tokens, then ranks; dropped ranks (-1) left out."""
    experts = dict.fromkeys(selected.ravel().tolist())
    experts.pop(-1, None)
    return list(experts)


def first_of(keys: np.ndarray, order: tuple[np.ndarray, ...], count: int) -> list[int]:
    """The `count` keys that come first by sort keys, the most significant first; among equals, as `keys` has them."""
    column, is_alone = order[0], len(order) == 1
    if count == 1 and is_alone:
        return [keys.item(column.argmin())]
    if count < len(keys):  # sort only what can be among them
        limit = column.min() if count == 1 else np.partition(column, count - 1)[count - 1]
        smallest = (column <= limit).nonzero()[0]
        keys, order = keys[smallest], [part[smallest] for part in order]
    first = order[0].argsort(kind="stable") if is_alone else np.lexsort(order[::-1])
    return keys[first[:count]].tolist()
