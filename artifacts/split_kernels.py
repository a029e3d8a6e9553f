"""The loops of MoEpic's solver, compiled; `artifacts.splits` says what they solve.

Shapes: L layers, E experts, G cells of a budget grid, N budgets that a layer may have, B windows. `curves` are hit
[L, E + 1], prediction [L, Y] and cached [L, E + 1, Y], the hit rate of what is predicted at each size; `times` the
seconds of a layer's experts, of its attention, of loading one expert, and k. `windows` [L + 1] are seconds too.
"""

import numpy as np

from artifacts.kernels import exact_part, kernel

_CURVES = "Tuple((float64[:, ::1], float64[:, ::1], float64[:, :, ::1]))"
_TIMES = "UniTuple(float64, 4)"
_CLOSE = 1e-9  # experts: budgets are sums of steps
_FALLS = 1e-12  # loads: less is rounding
_CANDIDATES = 3


@exact_part
def _covered(curves, times, layer, budget, window):
    """The most experts of a token that are in the fast tier in time, and the cache size that has them; the smallest."""
    hit, prediction, cached = curves[0][layer], curves[1][layer], curves[2][layer]
    load_s, k = times[2], times[3]
    most, best = -1.0, 0
    for size in range(max(1, int(np.ceil(budget - _CLOSE))), len(hit)):
        theta = min(1.0, budget / size)
        covered, spent_s = k * hit[size] * theta, 0.0
        for rank in range(len(prediction)):
            absent = 1 - cached[size, rank] * theta
            spent_s += absent * load_s
            if spent_s > window:
                break
            covered += absent * prediction[rank]
        if covered > most:
            most, best = covered, size
        if most >= k:
            break
    return min(k, most), best


@exact_part
def _after(times, covered):
    """Exposed seconds, and the next layer's window, when so many experts of a token are there in time."""
    moe_s, attention_s, load_s, k = times
    hide_s, miss_s = covered * moe_s / k, (k - covered) * load_s
    return max(0.0, miss_s - hide_s), moe_s - min(hide_s, miss_s) + attention_s


@exact_part
def _walk(curves, times, budgets, first, last, windows, exposed, sizes):
    """Every layer from the `first`, whose window is known, to the `last`, and on until a window is what it was."""
    for layer in range(first, len(budgets)):
        covered, sizes[layer] = _covered(curves, times, layer, budgets[layer], windows[layer])
        exposed[layer], window = _after(times, covered)
        if layer >= last and window == windows[layer + 1]:
            return
        windows[layer + 1] = window


@exact_part
def _change(curves, times, budgets, windows, exposed, one, of_one, other, of_other):
    """By how much the summed exposed time changes when two layers have other budgets."""
    change, window = 0.0, windows[min(one, other)]
    for layer in range(min(one, other), len(budgets)):
        budget = of_one if layer == one else of_other if layer == other else budgets[layer]
        if window == windows[layer] and budget == budgets[layer]:
            if layer > max(one, other):
                return change
            window = windows[layer + 1]
            continue
        after, window = _after(times, _covered(curves, times, layer, budget, window)[0])
        change += after - exposed[layer]
    return change


@kernel(f"void({_CURVES}, {_TIMES}, float64[::1], float64[::1], float64[::1], int64[::1])", exact=True)
def split(curves, times, budgets, windows, exposed, sizes):
    """Fill `windows` but the first, `exposed` [L] and `sizes` [L]."""
    _walk(curves, times, budgets, 0, len(budgets), windows, exposed, sizes)


@exact_part
def _own(curves, times, budget, step, layer, window, exposed):
    """What this layer by itself gains by a step more and loses by a step less; where it cannot, less than nothing."""
    gain, loss = -np.inf, np.inf
    if budget + step <= curves[0].shape[1] - 1 + _CLOSE:
        gain = exposed - _after(times, _covered(curves, times, layer, budget + step, window)[0])[0]
    if budget - step > _CLOSE:
        loss = _after(times, _covered(curves, times, layer, budget - step, window)[0])[0] - exposed
    return gain, loss


@exact_part
def _best_pair(gains, losses):
    """Who gains most and who loses least, two different layers; of equals the lowest."""
    best, receiver, giver = -np.inf, -1, -1
    for one in range(len(gains)):
        for other in range(len(losses)):
            if one != other and gains[one] - losses[other] > best:
                best, receiver, giver = gains[one] - losses[other], one, other
    return receiver, giver


@kernel(f"void({_CURVES}, {_TIMES}, float64[::1], float64, float64[::1], float64[::1], int64[::1])", exact=True)
def greedy(curves, times, budgets, step, windows, exposed, sizes):
    """While the sum falls, move a step to the layer that by itself gains most from the one that loses least."""
    _walk(curves, times, budgets, 0, len(budgets), windows, exposed, sizes)
    start, moved = budgets.copy(), np.zeros(len(budgets))
    gains, losses = np.empty(len(budgets)), np.empty(len(budgets))
    is_known = np.zeros(len(budgets), np.bool_)
    while True:
        for layer in range(len(budgets)):
            if not is_known[layer]:
                own = _own(curves, times, budgets[layer], step, layer, windows[layer], exposed[layer])
                gains[layer], losses[layer] = own
        receiver, giver = _best_pair(gains, losses)
        if receiver < 0:
            return
        more, less = start[receiver] + (moved[receiver] + 1) * step, start[giver] + (moved[giver] - 1) * step
        change = _change(curves, times, budgets, windows, exposed, receiver, more, giver, less)
        if change >= -_FALLS * times[2]:
            return
        moved[receiver] += 1
        moved[giver] -= 1
        budgets[receiver], budgets[giver] = more, less
        before = windows.copy()
        _walk(curves, times, budgets, min(receiver, giver), max(receiver, giver), windows, exposed, sizes)
        is_known[:] = before[:-1] == windows[:-1]
        is_known[receiver] = is_known[giver] = False


@kernel(f"void({_CURVES}, {_TIMES}, float64[::1], float64, float64[::1], float64[::1], int64[::1])", exact=True)
def refine(curves, times, budgets, step, windows, exposed, sizes):
    """Move a step at a time between any two layers, judged by what becomes of the whole sum, while it falls."""
    _walk(curves, times, budgets, 0, len(budgets), windows, exposed, sizes)
    num_experts = curves[0].shape[1] - 1
    more, less = np.empty(len(budgets)), np.empty(len(budgets))
    while True:
        for layer in range(len(budgets)):
            up, down = budgets[layer] + step, budgets[layer] - step
            at = (curves, times, budgets, windows, exposed, layer)
            more[layer] = _change(*at, up, layer, up) if up <= num_experts + _CLOSE else np.inf
            less[layer] = _change(*at, down, layer, down) if down > _CLOSE else np.inf
        best, receiver, giver = -_FALLS * times[2], -1, -1
        for one in np.argsort(more)[:_CANDIDATES]:
            for other in np.argsort(less)[:_CANDIDATES]:
                if one != other and more[one] < np.inf and less[other] < np.inf:
                    pair = (one, budgets[one] + step, other, budgets[other] - step)
                    change = _change(curves, times, budgets, windows, exposed, *pair)
                    if change < best:
                        best, receiver, giver = change, one, other
        if receiver < 0:
            return
        budgets[receiver] += step
        budgets[giver] -= step
        _walk(curves, times, budgets, min(receiver, giver), max(receiver, giver), windows, exposed, sizes)


@exact_part
def _covered_in(curves, times, layer, budget, windows, most):
    """`_covered` [B] in each of these windows, ascending."""
    hit, prediction, cached = curves[0][layer], curves[1][layer], curves[2][layer]
    load_s, k = times[2], times[3]
    most[:] = 0
    for size in range(max(1, int(np.ceil(budget - _CLOSE))), len(hit)):
        theta = min(1.0, budget / size)
        covered, spent_s, at = k * hit[size] * theta, 0.0, 0
        for rank in range(len(prediction)):
            absent = 1 - cached[size, rank] * theta
            spent_s += absent * load_s
            while at < len(windows) and spent_s > windows[at]:
                most[at] = max(most[at], min(k, covered))
                at += 1
            if at == len(windows):
                break
            covered += absent * prediction[rank]
        for wide in range(at, len(windows)):
            most[wide] = max(most[wide], min(k, covered))


@kernel(f"float64[:, :, ::1]({_CURVES}, {_TIMES}, float64[::1], float64[::1])", exact=True)
def tabulate(curves, times, budgets, windows):
    """[L, N, B] experts covered with each of these budgets in each of these windows, both ascending."""
    table = np.empty((len(curves[0]), len(budgets), len(windows)))
    for layer in range(len(table)):
        for place, budget in enumerate(budgets):
            _covered_in(curves, times, layer, budget, windows, table[layer, place])
    return table


@kernel(f"int64[::1]({_TIMES}, float64[:, :, ::1], float64[::1], float64, int64)", exact=True)
def best_cells(times, table, windows, first_window, num_cells):
    """Cells [L] of each layer, 0 to N - 1, `num_cells` in all, by dynamic programming over the cells spent so far.

    Of all ways to spend them the cheapest goes on, with its window: a dearer one with a better window is lost.
    """
    num_layers, num_budgets, _ = table.shape
    chosen = np.zeros((num_layers, num_cells + 1), np.int64)
    cost, window = np.full(num_cells + 1, np.inf), np.zeros(num_cells + 1)
    cost[0], window[0] = 0.0, first_window
    for layer in range(num_layers):
        new_cost, new_window = np.full(num_cells + 1, np.inf), np.zeros(num_cells + 1)
        for spent in range(num_cells + 1):
            if cost[spent] == np.inf:
                continue
            at = max(0, np.searchsorted(windows, window[spent], side="right") - 1)
            for more in range(min(num_budgets, num_cells - spent + 1)):
                exposed, after = _after(times, table[layer, more, at])
                if cost[spent] + exposed < new_cost[spent + more]:
                    new_cost[spent + more], new_window[spent + more] = cost[spent] + exposed, after
                    chosen[layer, spent + more] = more
        cost, window = new_cost, new_window
    cells = np.empty(num_layers, np.int64)
    for layer in range(num_layers - 1, -1, -1):
        cells[layer] = chosen[layer, num_cells]
        num_cells -= cells[layer]
    return cells
