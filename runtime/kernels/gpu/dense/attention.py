"""Attention of a few tokens over a cache at fixed addresses, in two Triton kernels. Importing this
module imports triton.

The first one normalises and rotates the heads of query and key, rounded where the module rounds
them, and writes key and value into the cache, at a place that it reads on the device. The second
one reads the cache as far as the text goes; scores and sums are float32 without rounding in
between. Its programs share the positions of a head, and the last one to end adds them up.
"""

import triton
import triton.language as tl

POSITIONS = 32  # that a program of `attend` takes at a time
MOST_SHARES = 16  # of the positions of a head


@triton.jit
def _heads(
    x_ptr, head, count, dim, out_ptr, step, weights_ptr, span, eps, is_rounded, cos_ptr, sin_ptr,
    half, is_paired, is_each, is_wide, is_late: tl.constexpr, rows: tl.constexpr,
    block: tl.constexpr, span_block: tl.constexpr,
):  # fmt: skip
    """Normalise the heads [R] of x [count, D] by their part of the norm's weights, rotate them and
    write them to `out_ptr`, `step` numbers apart. The norm spans each head, or all heads."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    places = tl.arange(0, block)[None, :]
    is_head = (head < count)[:, None]
    is_there = is_head & (places < dim)
    is_turned = is_head & (places < 2 * half)
    is_first = tl.where(is_paired != 0, places % 2 == 0, places < half)
    distance = tl.where(is_paired != 0, 1, half)
    partners = tl.where(is_first, places + distance, places - distance)
    own_ptr = x_ptr + head[:, None] * dim
    x = tl.load(own_ptr + places, mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(own_ptr + partners, mask=is_turned, other=0.0).to(tl.float32)
    if weights_ptr is not None and not is_late:
        first = (head * dim // span * span)[:, None]
        spanned = tl.arange(0, span_block)[None, :]
        is_spanned = is_head & (spanned < span)
        row = tl.load(x_ptr + first + spanned, mask=is_spanned, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(row * row, axis=1) / span + eps)[:, None]
        x *= scale
        other *= scale
        if is_rounded != 0:
            x = x.to(dtype).to(tl.float32)
            other = other.to(dtype).to(tl.float32)
        begin_ptr = weights_ptr + (head[:, None] * dim - first)
        x *= tl.load(begin_ptr + places, mask=is_there, other=0.0)
        other *= tl.load(begin_ptr + partners, mask=is_turned, other=0.0)
        x = x.to(dtype).to(tl.float32)
        other = other.to(dtype).to(tl.float32)
    if cos_ptr is not None:
        pairs = tl.where(is_paired != 0, places // 2, tl.where(is_first, places, partners))
        angles = tl.where(is_each != 0, places, pairs)
        cos = tl.load(cos_ptr + angles, mask=places < 2 * half, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angles, mask=places < 2 * half, other=0.0).to(tl.float32)
        near = x * cos
        far = tl.where(is_first, -other, other) * sin
        if is_wide == 0:
            near = near.to(dtype).to(tl.float32)
            far = far.to(dtype).to(tl.float32)
        x = tl.where(is_turned, (near + far).to(dtype).to(tl.float32), x)
    if weights_ptr is not None and is_late:
        x *= tl.rsqrt(tl.sum(x * x, axis=1) / dim + eps)[:, None]
        if is_rounded != 0:
            x = x.to(dtype).to(tl.float32)
        x *= tl.load(weights_ptr + places, mask=places < dim, other=0.0)
    tl.store(out_ptr + head[:, None] * step + places, x.to(dtype), mask=is_there)


@triton.jit(
    do_not_specialize=["room", "half", "angles", "is_paired", "is_each", "is_wide", "is_rounded"]
)
def prepare(
    query_ptr, key_ptr, value_ptr, out_ptr, keys_ptr, values_ptr, count_ptr, query_weights_ptr,
    key_weights_ptr, cos_ptr, sin_ptr, num_heads, num_keys, dim, value_dim, room, query_span,
    key_span, query_eps, key_eps, half, angles, is_paired, is_each, is_wide, is_rounded,
    is_late: tl.constexpr, rows: tl.constexpr, block: tl.constexpr, value_block: tl.constexpr,
    query_block: tl.constexpr, key_block: tl.constexpr,
):  # fmt: skip
    """Prepare R heads of one of T tokens: of the query [T, N, D], of the key, or of the value. The
    cache's keys [Nk, C, D] and values have room for C tokens and are a ring; `count` is the number
    of tokens before the first. A token has `angles` cosines."""
    number = tl.program_id(0)
    token = tl.program_id(1)
    query_ptr += token * num_heads * dim
    out_ptr += token * num_heads * dim
    key_ptr += token * num_keys * dim
    value_ptr += token * num_keys * value_dim
    if cos_ptr is not None:
        cos_ptr += token * angles
        sin_ptr += token * angles
    of_query = tl.cdiv(num_heads, rows)
    of_key = tl.cdiv(num_keys, rows)
    place = (tl.load(count_ptr) + token) % room
    head = tl.arange(0, rows)
    if number < of_query:
        _heads(
            query_ptr, number * rows + head, num_heads, dim, out_ptr, dim, query_weights_ptr,
            query_span, query_eps, is_rounded, cos_ptr, sin_ptr, half, is_paired, is_each, is_wide,
            is_late, rows, block, query_block,
        )  # fmt: skip
    elif number < of_query + of_key:
        _heads(
            key_ptr, (number - of_query) * rows + head, num_keys, dim, keys_ptr + place * dim,
            room * dim, key_weights_ptr, key_span, key_eps, is_rounded, cos_ptr, sin_ptr, half,
            is_paired, is_each, is_wide, is_late, rows, block, key_block,
        )  # fmt: skip
    else:
        head += (number - of_query - of_key) * rows
        places = tl.arange(0, value_block)[None, :]
        is_there = (head < num_keys)[:, None] & (places < value_dim)
        value = tl.load(value_ptr + head[:, None] * value_dim + places, mask=is_there)
        own_ptr = values_ptr + (head[:, None] * room + place) * value_dim
        tl.store(own_ptr + places, value, mask=is_there)


@triton.jit(do_not_specialize=["room"])
def attend(
    query_ptr, keys_ptr, values_ptr, count_ptr, mask_ptr, sinks_ptr, shares_ptr, done_ptr, out_ptr,
    groups, dim, value_dim, room, scaling,
    positions: tl.constexpr, block: tl.constexpr, value_block: tl.constexpr, shares: tl.constexpr,
):  # fmt: skip
    """Compute one share of a head's attention, out [T, N, V], in a grid [N, shares, T].
    `shares_ptr` has room for the float32 of every share [T, N, shares, V + 2]: sums, the largest
    score, and the sum of weights. `done` [T, N] counts programs: it is zero before and after. The
    last program of a head adds its shares up, and the sink takes its share of the weights. The mask
    [T, C] hides earlier tokens; those that follow a token are never read."""
    head = tl.program_id(0)
    share = tl.program_id(1)
    token = tl.program_id(2)
    length = tl.minimum(tl.load(count_ptr) + token + 1, room).to(tl.int32)
    key_head = (head // groups).to(tl.int64)
    places = tl.arange(0, block)
    value_places = tl.arange(0, value_block)
    is_place = places < dim
    is_value = value_places < value_dim
    row = token * tl.num_programs(0) + head
    query = tl.load(query_ptr + row * dim + places, mask=is_place, other=0.0).to(tl.float32)
    most = float("-inf")
    total = 0.0
    sums = tl.zeros((value_block,), tl.float32)
    for first in range(share * positions, length, shares * positions):
        own = first + tl.arange(0, positions)
        is_there = own < length
        rows = key_head * room + own
        keys = tl.load(
            keys_ptr + rows[:, None] * dim + places[None, :],
            mask=is_there[:, None] & is_place[None, :],
            other=0.0,
        )
        scores = tl.sum(keys.to(tl.float32) * query[None, :], axis=1) * scaling
        if mask_ptr is not None:
            mask = tl.load(mask_ptr + token * room + own, mask=is_there, other=0)
            if mask_ptr.dtype.element_ty == tl.uint8:
                scores = tl.where(mask != 0, scores, float("-inf"))
            else:
                scores += mask.to(tl.float32)
        scores = tl.where(is_there, scores, float("-inf"))
        largest = tl.maximum(most, tl.max(scores, axis=0))
        base = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp(scores - base)
        before = tl.exp(most - base)
        values = tl.load(
            values_ptr + rows[:, None] * value_dim + value_places[None, :],
            mask=is_there[:, None] & is_value[None, :],
            other=0.0,
        )
        sums = sums * before + tl.sum(weights[:, None] * values.to(tl.float32), axis=0)
        total = total * before + tl.sum(weights, axis=0)
        most = largest
    own_ptr = shares_ptr + (row * shares + share) * (value_dim + 2)
    tl.store(own_ptr + value_places, sums, mask=is_value)
    tl.store(own_ptr + value_dim, most)
    tl.store(own_ptr + value_dim + 1, total)
    # all threads of this program have stored their share before its count is released
    tl.debug_barrier()
    num_before = tl.atomic_add(done_ptr + row, 1, sem="acq_rel", scope="gpu")
    if num_before == shares - 1:
        tl.debug_barrier()
        tl.store(done_ptr + row, 0)
        rows_ptr = shares_ptr + row * shares * (value_dim + 2)
        rows_ptr += tl.arange(0, shares) * (value_dim + 2)
        mosts = tl.load(rows_ptr + value_dim)
        most = tl.max(mosts, axis=0)
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head)
            most = tl.maximum(most, sink)
        factors = tl.exp(mosts - most)
        total = tl.sum(tl.load(rows_ptr + value_dim + 1) * factors, axis=0)
        if sinks_ptr is not None:
            total += tl.exp(sink - most)
        cells = rows_ptr[:, None] + value_places[None, :]
        all_sums = tl.load(cells, mask=is_value[None, :], other=0.0)
        out = tl.sum(all_sums * factors[:, None], axis=0) / total
        head_ptr = out_ptr + row * value_dim + value_places
        tl.store(head_ptr, out.to(out_ptr.dtype.element_ty), mask=is_value)
