"""Which come first: the experts of a step as they are met, keys by an eviction policy's sort keys."""

import numpy as np


def distinct(selected: np.ndarray) -> list[int]:
    """Experts in order of first appearance, scanning tokens, then ranks; dropped ranks (-1) left out."""
    experts = dict.fromkeys(selected.ravel().tolist())
    experts.pop(-1, None)
    return list(experts)


def first_of(keys: np.ndarray, order: tuple[np.ndarray, ...], count: int) -> list[int]:
    """The `count` keys that come first by sort keys, the most significant first; among equals, as `keys` has them."""
    if len(order) > 1:
        return keys[np.lexsort(order[::-1])[:count]].tolist()
    column = order[0]
    if count == 1:
        return [keys.item(column.argmin())]
    if count < len(keys):  # sort only what can be among them
        smallest = (column <= np.partition(column, count - 1)[count - 1]).nonzero()[0]
        keys, column = keys[smallest], column[smallest]
    return keys[column.argsort(kind="stable")[:count]].tolist()
