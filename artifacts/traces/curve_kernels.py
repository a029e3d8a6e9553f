"""One layer of a trace run through caches of every size at once, compiled, for
`artifacts.traces.curves`.

Shapes: S steps, R predictions, E experts, E + 1 cache sizes from 0. `resident` [E, E + 1] is 1
where the cache of that size holds that expert, `held` [E + 1] counts the experts that each cache
holds.
"""

import numpy as np

from artifacts.common.numba_loops import exact_part, kernel


@exact_part
def _fit(resident, held, wanted, order):
    """Load all wanted experts into the caches that can hold them all; evict other experts in
    `order` where they are too many."""
    smallest = len(wanted)
    short = np.zeros(len(held), np.int64)
    for expert in wanted:
        for size in range(smallest, len(held)):
            held[size] += 1 - resident[expert, size]
            resident[expert, size] = 1
    for size in range(smallest, len(held)):
        short[size] = max(held[size] - size, 0)
        held[size] -= short[size]
    is_wanted = np.zeros(len(order), np.bool_)
    is_wanted[wanted] = True
    excess = short.max()
    for expert in order:
        if not excess:
            return
        if is_wanted[expert]:
            continue
        excess = 0
        for size in range(smallest, len(held)):
            evicted = np.int64(resident[expert, size]) if short[size] else 0
            resident[expert, size] -= np.uint8(evicted)
            short[size] -= evicted
            excess = max(excess, short[size])


@exact_part
def _fit_in_waves(resident, held, wanted, order, size):
    """Load into one cache that is smaller than what is wanted: an expert that was computed may be
    evicted for the next, in `order`."""
    is_wanted = np.zeros(len(order), np.bool_)
    is_wanted[wanted] = True
    missing = [expert for expert in wanted if not resident[expert, size]]
    num_held = len(wanted) - len(missing)
    done = 0
    for expert in range(len(order)):
        resident[expert, size] &= np.uint8(is_wanted[expert])
    while True:
        num_loads = min(size - num_held, len(missing) - done)
        for place in range(done, done + num_loads):
            resident[missing[place], size] = 1
        num_held = num_held + num_loads
        done = done + num_loads
        short = len(missing) - done - (size - num_held)
        if done == len(missing):
            held[size] = num_held
            return
        for expert in order:
            if short > 0 and resident[expert, size]:
                resident[expert, size] = 0
                num_held = num_held - 1
                short = short - 1


@kernel(
    "void(uint8[:, ::1], int64[::1], int64[::1], int64[::1], boolean[::1], int64[:, ::1], "
    "int64[:, ::1], int64[::1], int64[::1], int64[:, ::1])",
    exact=True,
)
def follow(resident, held, wanted, starts, is_counted, order, ranked, ranked_starts, hits, cached):
    """Continue with these steps. Step s wants `wanted[starts[s] : starts[s + 1]]`, in order of
    first appearance, and evicts in the order `order[s]` [E]. Its predictions are the rows of
    `ranked` [R, E] from `ranked_starts[s]` on, most probable first. Adds to `hits` [E + 1] and to
    `cached` [E, E + 1], how often the expert at each rank was resident."""
    for step in range(len(starts) - 1):
        step_wanted = wanted[starts[step] : starts[step + 1]]
        if is_counted[step]:
            for expert in step_wanted:
                for size in range(len(held)):
                    hits[size] += resident[expert, size]
            for row in range(ranked_starts[step], ranked_starts[step + 1]):
                for rank in range(len(resident)):
                    expert = ranked[row, rank]
                    for size in range(len(held)):
                        cached[rank, size] += resident[expert, size]
        for size in range(1, min(len(step_wanted), len(held))):
            _fit_in_waves(resident, held, step_wanted, order[step], size)
        _fit(resident, held, step_wanted, order[step])
