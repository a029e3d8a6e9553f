"""The loops of MoEpic's solver, compiled; `artifacts.splits.solve` defines the problem.

Shapes: L layers, E experts, G cells of a budget grid, N budgets that a layer may have, B windows.
`curves` are hit [L, E + 1], prediction [L, Y] and cached [L, E + 1, Y], the hit rate of predicted
experts at each size. `times` are the seconds of a layer's experts, of its attention and of loading
an expert's bytes; then k; then the overhead of each transfer in seconds, on the link and of the
engine's own work. `windows` [L + 1] are in seconds.
"""

import numpy as np

from artifacts.common.numba_loops import exact_part, kernel

_CURVES = "Tuple((float64[:, ::1], float64[:, ::1], float64[:, :, ::1]))"
_TIMES = "UniTuple(float64, 6)"
_CLOSE = 1e-9  # experts; budgets are sums of steps, with rounding errors
_LEAST_GAIN = 1e-12  # loads
_NO_LAYER = -1
_CANDIDATES = 3
_TINY = 1e-30


@exact_part
def _sizes(budget, hit):
    """Cache sizes at which no expert exceeds a whole one; none where the budget exceeds all
    experts."""
    return range(max(1, int(np.ceil(budget - _CLOSE))), len(hit))


@exact_part
def _cut(budget, size):
    """Theta, and the transfers of an absent expert: one for a whole expert, two for a cut one. A
    cached expert takes one less."""
    return min(1.0, budget / size), 2.0 if budget < size - _CLOSE else 1.0


@exact_part
def _worth(times, covered, overhead_s):
    """Experts covered, less as many as would hide and save the transfers' overhead."""
    moe_s = times[0]
    load_s = times[2]
    k = times[3]
    return covered - overhead_s / max(load_s + moe_s / k, _TINY) if overhead_s > 0 else covered


@exact_part
def _least_change(times):
    """The smallest change of summed exposed seconds that counts; smaller ones are rounding."""
    return _LEAST_GAIN * (times[2] + times[4] + times[5])


@exact_part
def _paid(times, transfers, prefetched):
    """Seconds of overhead: of the link, for demand transfers, and of the engine, for all
    transfers."""
    return max(0.0, transfers) * times[4], (max(0.0, transfers) + prefetched) * times[5]


@exact_part
def _covered(curves, times, layer, budget, window):
    """Choose the best cache size, the smallest of equals. Return the experts of a token that are in
    the fast tier in time, the link's overhead for transfers of the others, the engine's overhead
    for all transfers, and the size. The first three are NaN where the budget exceeds all experts,
    which is therefore never best."""
    hit = curves[0][layer]
    prediction = curves[1][layer]
    cached = curves[2][layer]
    load_s = times[2]
    k = times[3]
    latency_s = times[4]
    most = -np.inf
    best = 0
    best_covered = best_link_s = best_host_s = np.nan
    for size in _sizes(budget, hit):
        theta, of_absent = _cut(budget, size)
        covered = k * hit[size] * theta
        spent_s = 0.0
        prefetched = 0.0
        transfers = k * (of_absent - hit[size])
        for rank in range(len(prediction)):
            absent = 1 - cached[size, rank] * theta
            coming = of_absent - cached[size, rank]
            spent_s += absent * load_s + coming * latency_s
            if spent_s > window:
                break
            covered += absent * prediction[rank]
            transfers -= coming * prediction[rank]
            prefetched += coming
        covered = min(k, covered)
        link_s, host_s = _paid(times, transfers, prefetched)
        worth = _worth(times, covered, link_s + host_s)
        if worth > most:
            most = worth
            best = size
            best_covered = covered
            best_link_s = link_s
            best_host_s = host_s
        if most >= k:
            break
    return best_covered, best_link_s, best_host_s, best


@exact_part
def _after(times, covered, link_s, host_s):
    """Return the exposed seconds, and the next layer's window, when `covered` experts of a token
    are in the fast tier in time."""
    moe_s, attention_s, load_s, k = times[:4]
    hide_s = covered * moe_s / k
    miss_s = (k - covered) * load_s + link_s
    return max(0.0, miss_s - hide_s) + host_s, moe_s - min(hide_s, miss_s) + attention_s


@exact_part
def _walk(curves, times, budgets, first, last, windows, exposed, sizes):
    """Recompute the layers from `first`, whose window is known, to `last`, and further until a
    window is unchanged."""
    for layer in range(first, len(budgets)):
        covered, link_s, host_s, sizes[layer] = _covered(
            curves, times, layer, budgets[layer], windows[layer]
        )
        exposed[layer], window = _after(times, covered, link_s, host_s)
        if layer >= last and window == windows[layer + 1]:
            return
        windows[layer + 1] = window


@exact_part
def exposed_change(curves, times, budgets, windows, exposed, first, of_first, second, of_second):
    """The change of the summed exposed time when two layers, or one given twice, get other
    budgets."""
    change = 0.0
    window = windows[min(first, second)]
    for layer in range(min(first, second), len(budgets)):
        budget = of_first if layer == first else of_second if layer == second else budgets[layer]
        if window == windows[layer] and budget == budgets[layer]:
            if layer > max(first, second):
                return change
            window = windows[layer + 1]
            continue
        covered, link_s, host_s, _ = _covered(curves, times, layer, budget, window)
        after, window = _after(times, covered, link_s, host_s)
        change += after - exposed[layer]
    return change


@kernel(
    f"void({_CURVES}, {_TIMES}, float64[::1], float64[::1], float64[::1], int64[::1])", exact=True
)
def split(curves, times, budgets, windows, exposed, sizes):
    """Fill `windows` but the first, `exposed` [L] and `sizes` [L]."""
    _walk(curves, times, budgets, 0, len(budgets), windows, exposed, sizes)


@exact_part
def _exposed_after(curves, times, budgets, step, first_window):
    """Exposed seconds [L] after all layers got a step more (less, if it is negative), and which of
    them can take it.

    A layer that cannot, for want of experts or of budget, keeps its budget: the paper does not say
    what becomes of it.
    """
    most = curves[0].shape[1] - 1 + _CLOSE
    shifted = budgets.copy()
    can_take = np.zeros(len(budgets), np.bool_)
    for layer in range(len(budgets)):
        can_take[layer] = _CLOSE < budgets[layer] + step <= most
        if can_take[layer]:
            shifted[layer] += step
    windows = np.full(len(budgets) + 1, first_window)
    exposed = np.zeros(len(budgets))
    _walk(
        curves, times, shifted, 0, len(budgets), windows, exposed, np.zeros(len(budgets), np.int64)
    )
    return exposed, can_take


@exact_part
def _most(values, is_allowed):
    """The first layer of the largest value among those allowed, or _NO_LAYER."""
    best = -np.inf
    chosen = _NO_LAYER
    for layer in range(len(values)):
        if is_allowed[layer] and values[layer] > best:
            best = values[layer]
            chosen = layer
    return chosen


@exact_part
def _published_pair(curves, times, budgets, step, first_window, exposed):
    """Return the layer that gains most when all layers get a step more, and the other layer that
    loses least when all get a step less (Algorithm 1, lines 17 to 20). Either is _NO_LAYER where
    none can."""
    more, can_receive = _exposed_after(curves, times, budgets, step, first_window)
    less, can_give = _exposed_after(curves, times, budgets, -step, first_window)
    receiver = _most(exposed - more, can_receive)
    if receiver != _NO_LAYER:
        can_give[receiver] = False
    return receiver, _most(exposed - less, can_give)


@kernel(
    f"void({_CURVES}, {_TIMES}, float64[::1], float64, float64[::1], float64[::1], int64[::1])",
    exact=True,
)
def greedy(curves, times, budgets, step, windows, exposed, sizes):
    """Move a step of `step` experts between the published pair of layers, as long as the sum
    falls."""
    _walk(curves, times, budgets, 0, len(budgets), windows, exposed, sizes)
    start = budgets.copy()
    moved = np.zeros(len(budgets))
    while True:
        receiver, giver = _published_pair(curves, times, budgets, step, windows[0], exposed)
        if receiver == _NO_LAYER or giver == _NO_LAYER:
            return
        more = start[receiver] + (moved[receiver] + 1) * step
        less = start[giver] + (moved[giver] - 1) * step
        change = exposed_change(
            curves, times, budgets, windows, exposed, receiver, more, giver, less
        )
        if change >= -_least_change(times):
            return
        moved[receiver] += 1
        moved[giver] -= 1
        budgets[receiver] = more
        budgets[giver] = less
        _walk(
            curves,
            times,
            budgets,
            min(receiver, giver),
            max(receiver, giver),
            windows,
            exposed,
            sizes,
        )


@kernel(
    f"void({_CURVES}, {_TIMES}, float64[::1], float64, float64[::1], float64[::1], int64[::1])",
    exact=True,
)
def refine(curves, times, budgets, step, windows, exposed, sizes):
    """Move one step at a time between any two layers, judged by the change of the whole sum, while
    it falls."""
    _walk(curves, times, budgets, 0, len(budgets), windows, exposed, sizes)
    more = np.empty(len(budgets))
    less = np.empty(len(budgets))
    while True:
        for layer in range(len(budgets)):
            up = budgets[layer] + step
            down = budgets[layer] - step
            at = (curves, times, budgets, windows, exposed, layer)
            more[layer] = exposed_change(*at, up, layer, up)
            less[layer] = exposed_change(*at, down, layer, down) if down > _CLOSE else np.inf
        best = -_least_change(times)
        receiver = _NO_LAYER
        giver = _NO_LAYER
        for gaining in np.argsort(more)[:_CANDIDATES]:
            for losing in np.argsort(less)[:_CANDIDATES]:
                if gaining != losing and less[losing] < np.inf:
                    pair = (gaining, budgets[gaining] + step, losing, budgets[losing] - step)
                    change = exposed_change(curves, times, budgets, windows, exposed, *pair)
                    if change < best:
                        best = change
                        receiver = gaining
                        giver = losing
        if receiver == _NO_LAYER:
            return
        budgets[receiver] += step
        budgets[giver] -= step
        _walk(
            curves,
            times,
            budgets,
            min(receiver, giver),
            max(receiver, giver),
            windows,
            exposed,
            sizes,
        )


@exact_part
def _note(times, covered, transfers, prefetched, best):
    """Store `covered` and the overheads in `best` [3] where they are worth more than the stored
    values."""
    covered = min(times[3], covered)
    link_s, host_s = _paid(times, transfers, prefetched)
    if _worth(times, covered, link_s + host_s) > _worth(times, best[0], best[1] + best[2]):
        best[0] = covered
        best[1] = link_s
        best[2] = host_s


@exact_part
def _covered_in(curves, times, layer, budget, windows, best):
    """Fill `best` [B, 3] with what `_covered` returns for each of these windows, ascending."""
    hit = curves[0][layer]
    prediction = curves[1][layer]
    cached = curves[2][layer]
    load_s = times[2]
    k = times[3]
    latency_s = times[4]
    best[:] = -np.inf
    for size in _sizes(budget, hit):
        theta, of_absent = _cut(budget, size)
        covered = k * hit[size] * theta
        spent_s = 0.0
        prefetched = 0.0
        at = 0
        transfers = k * (of_absent - hit[size])
        for rank in range(len(prediction)):
            absent = 1 - cached[size, rank] * theta
            coming = of_absent - cached[size, rank]
            spent_s += absent * load_s + coming * latency_s
            while at < len(windows) and spent_s > windows[at]:
                _note(times, covered, transfers, prefetched, best[at])
                at += 1
            if at == len(windows):
                break
            covered += absent * prediction[rank]
            transfers -= coming * prediction[rank]
            prefetched += coming
        for wide in range(at, len(windows)):
            _note(times, covered, transfers, prefetched, best[wide])


@kernel(f"float64[:, :, :, ::1]({_CURVES}, {_TIMES}, float64[::1], float64[::1])", exact=True)
def tabulate(curves, times, budgets, windows):
    """[L, N, B, 3] experts covered, and the two overheads, for each budget in each window, both
    ascending."""
    table = np.empty((len(curves[0]), len(budgets), len(windows), 3))
    for layer in range(len(table)):
        for place, budget in enumerate(budgets):
            _covered_in(curves, times, layer, budget, windows, table[layer, place])
    return table


@kernel(f"int64[::1]({_TIMES}, float64[:, :, :, ::1], float64[::1], float64, int64)", exact=True)
def best_cells(times, table, windows, first_window, num_cells):
    """Cells [L] of each layer, 0 to N - 1, `num_cells` in all, by dynamic programming over the
    cells spent so far.

    Of all ways to spend as many cells only the cheapest is continued, with its window: a dearer one
    with a better window is lost.
    """
    num_layers, num_budgets = table.shape[:2]
    chosen = np.zeros((num_layers, num_cells + 1), np.int64)
    cost = np.full(num_cells + 1, np.inf)
    window = np.zeros(num_cells + 1)
    cost[0] = 0.0
    window[0] = first_window
    for layer in range(num_layers):
        new_cost = np.full(num_cells + 1, np.inf)
        new_window = np.zeros(num_cells + 1)
        for spent in range(num_cells + 1):
            if cost[spent] == np.inf:
                continue
            at = max(0, np.searchsorted(windows, window[spent], side="right") - 1)
            for more in range(min(num_budgets, num_cells - spent + 1)):
                covered, link_s, host_s = table[layer, more, at]
                exposed, after = _after(times, covered, link_s, host_s)
                if cost[spent] + exposed < new_cost[spent + more]:
                    new_cost[spent + more] = cost[spent] + exposed
                    new_window[spent + more] = after
                    chosen[layer, spent + more] = more
        cost = new_cost
        window = new_window
    cells = np.empty(num_layers, np.int64)
    for layer in range(num_layers - 1, -1, -1):
        cells[layer] = chosen[layer, num_cells]
        num_cells -= cells[layer]
    return cells
