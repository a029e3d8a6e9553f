"""One layer of a trace through caches of every size at once, compiled; `artifacts.traces.curves` says what comes of it.

Shapes: S steps, R predictions, E experts, E + 1 cache sizes from 0. `resident` [E, E + 1] is 1 where the cache of that
size holds that expert, `held` [E + 1] how many it holds.
"""

import numpy as np

from artifacts.common.numba_loops import exact_part, kernel


@exact_part
def _fit(resident, held, wanted, order):
    """Caches that hold all that is wanted: of the others the least leave, as many as it takes."""
    least = len(wanted)
    short = np.zeros(len(held), np.int64)
    for expert in wanted:
        for size in range(least, len(held)):
            held[size] += 1 - resident[expert, size]
            resident[expert, size] = 1
    for size in range(least, len(held)):
        short[size] = max(held[size] - size, 0)
        held[size] -= short[size]
    is_wanted = np.zeros(len(order), np.bool_)
    is_wanted[wanted] = True
    most = short.max()
    for expert in order:
        if not most:
            return
        if is_wanted[expert]:
            continue
        most = 0
        for size in range(least, len(held)):
            leaves = np.int64(resident[expert, size]) if short[size] else 0
            resident[expert, size] -= np.uint8(leaves)
            short[size] -= leaves
            most = max(most, short[size])


@exact_part
def _fit_in_waves(resident, held, wanted, order, size):
    """One cache that does not: what is loaded is computed and may leave for the next, the least first."""
    is_wanted = np.zeros(len(order), np.bool_)
    is_wanted[wanted] = True
    missing = [expert for expert in wanted if not resident[expert, size]]
    here, done = len(wanted) - len(missing), 0
    for expert in range(len(order)):
        resident[expert, size] &= np.uint8(is_wanted[expert])
    while True:
        coming = min(size - here, len(missing) - done)
        for place in range(done, done + coming):
            resident[missing[place], size] = 1
        here, done = here + coming, done + coming
        short = len(missing) - done - (size - here)
        if done == len(missing):
            held[size] = here
            return
        for expert in order:
            if short > 0 and resident[expert, size]:
                resident[expert, size] = 0
                here, short = here - 1, short - 1


@kernel(
    "void(uint8[:, ::1], int64[::1], int64[::1], int64[::1], boolean[::1], int64[:, ::1], int64[:, ::1], int64[::1], "
    "int64[::1], int64[:, ::1])",
    exact=True,
)
def follow(resident, held, wanted, starts, is_counted, order, ranked, ranked_starts, hits, cached):
    """Go on with these steps. Step s wants `wanted[starts[s] : starts[s + 1]]`, in order of first appearance, evicts by
    `order[s]` [E], the least first, and was predicted in the rows of `ranked` [R, E] from `ranked_starts[s]` on, most
    probable first. `hits` [E + 1] and `cached` [E, E + 1], how often the expert of each rank was there, count on.
    """
    for step in range(len(starts) - 1):
        mine = wanted[starts[step] : starts[step + 1]]
        if is_counted[step]:
            for expert in mine:
                for size in range(len(held)):
                    hits[size] += resident[expert, size]
            for row in range(ranked_starts[step], ranked_starts[step + 1]):
                for rank in range(len(resident)):
                    expert = ranked[row, rank]
                    for size in range(len(held)):
                        cached[rank, size] += resident[expert, size]
        for size in range(1, min(len(mine), len(held))):
            _fit_in_waves(resident, held, mine, order[step], size)
        _fit(resident, held, mine, order[step])
