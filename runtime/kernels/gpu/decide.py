"""Triton kernels that decide on the device which expert of a layer is evicted, and copy the missing
ones: no host waits.

`resolve` decides a layer of one token, or of a token and drafts behind it, as the eviction
policies `lru` and `lfu` do, or by the turns that a host writes, ties included. `resolve_ahead`
prefetches the experts that the next layer's router names, as the policy `next_gate` does with a
window of whole experts. So a replay with those policies counts the same. `fill` copies the experts
that either of them requests from page-locked memory, which the GPU reads itself. All depend on
device memory alone, so that a CUDA graph can contain them. Sessions use them with `--decide
device`. Importing this module imports triton.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from runtime.kernels.gpu.blocks import expert_start
from runtime.kernels.gpu.device_cache import AHEAD, ON_DEMAND, DeviceCache
from runtime.kernels.gpu.repeated import Repeated, blocks, width

_BLOCK = 4096  # words that one program of `fill` requests at once
# Programs of `fill`, each with up to two blocks under way, 512 KiB together: by calculation a link
# of PCIe 5 needs some 150 (55 GB/s for 2 to 3 us), and most multiprocessors stay free for compute.
_PROGRAMS = 16
_MOST = tl.constexpr((1 << 31) - 1)
_LEAST = tl.constexpr(-(1 << 31))
_LAST = tl.constexpr((1 << 63) - 1)
_TOLD = tl.constexpr(ON_DEMAND)
_TOLD_AHEAD = tl.constexpr(AHEAD)


def resolve(
    cache: DeviceCache,
    layer: int,
    ids: torch.Tensor,
    hits: torch.Tensor,
    arrivals: torch.Tensor,
    missing: torch.Tensor,
    *,
    is_ahead: bool,
) -> None:
    """Find or make a slot for each of the experts `ids` [T, K], or [K], of which those of a token
    differ. The layer has as many slots as experts are wanted. Tokens behind the first are drafts:
    their experts are loaded and not yet used.

    Write the slot of the layer to `hits` int32, as many as `ids`, where the expert is certainly
    there, otherwise to `arrivals` int32, and -1 to the other one; and to `missing` int32 the expert
    that must be copied there, or -1, also where a token before has it copied. `is_ahead`: experts
    are also prefetched, and the first use of a prefetched one is an arrival, since its copy may be
    under way."""
    num_layers, num_experts = cache.table.shape
    _, most_slots = cache.owner.shape
    sizes = layer, num_layers, num_experts, cache.num_slots[layer], most_slots
    launch = _resolving(*sizes, ids.numel(), ids.shape[-1], cache.kind, is_ahead)
    own = cache.table, cache.owner, cache.stamp, cache.unused, cache.left, cache.clock, cache.told
    launch((ids, *own, hits, arrivals, missing))


def resolve_ahead(
    cache: DeviceCache,
    layer: int,
    p: torch.Tensor,
    slots: torch.Tensor,
    missing: torch.Tensor,
    *,
    most: int,
    least: float,
) -> None:
    """Request up to `most` of the next layer's experts that have the largest `p` [E] float32, none
    below `least`, in a step of `layer`.

    The largest comes first; the layer behind the last one is the first. Experts that are already
    there are kept from eviction. Write `slots` and `missing` as `resolve` does, for as many experts
    as these [N] int32 have room for."""
    num_layers, num_experts = cache.table.shape
    _, most_slots = cache.owner.shape
    target = (layer + 1) % num_layers
    sizes = layer, target, num_layers, num_experts, cache.num_slots[target], most_slots, most
    launch = _resolving_ahead(*sizes, slots.numel(), least)
    own = cache.table, cache.owner, cache.stamp, cache.unused, cache.left, cache.clock, cache.told
    launch((p, *own, slots, missing))


def fill(
    host: torch.Tensor,
    starts: torch.Tensor,
    arena: torch.Tensor,
    slots: torch.Tensor,
    missing: torch.Tensor,
    *,
    first_key: int,
    first_slot: int,
) -> None:
    """Copy the `missing` [K] experts of a layer from `host` [L * E, words] int32, page-locked, into
    their `slots` [K], by few programs, so that others compute meanwhile.

    `starts` has the beginning of each slot of all layers in `arena`, int32, in words. The layer's
    first expert and slot are `first_key` and `first_slot`."""
    launch = _filling(first_key, first_slot, host.shape[1], slots.numel())
    launch((host, starts, arena, slots, missing))


@cache
def _resolving(
    layer: int,
    num_layers: int,
    num_experts: int,
    num_slots: int,
    most_slots: int,
    num_pairs: int,
    top_k: int,
    kind: str,
    is_ahead: bool,
) -> Repeated:
    sizes = layer, num_layers, num_experts, num_slots, most_slots
    own = {"num_pairs": num_pairs, "top_k": top_k, "width": width(most_slots)}
    own |= {"kind": kind, "is_ahead": is_ahead}
    return Repeated(_resolve, (1,), sizes, **own, num_warps=1)


@cache
def _resolving_ahead(
    layer: int,
    target: int,
    num_layers: int,
    num_experts: int,
    num_slots: int,
    most_slots: int,
    most: int,
    num_named: int,
    least: float,
) -> Repeated:
    sizes = layer, target, num_layers, num_experts, num_slots, most_slots, most
    own = {
        "num_named": num_named,
        "least": least,
        "width": width(most_slots),
        "num_p": width(num_experts),
        "block": width(num_named),
    }
    return Repeated(_resolve_ahead, (1,), sizes, **own, num_warps=1)


@cache
def _filling(first_key: int, first_slot: int, num_words: int, num_ranks: int) -> Repeated:
    count = blocks(num_words, _BLOCK)
    programs = min(count, _PROGRAMS)
    turns = {"programs": programs, "turns": blocks(count, programs), "block": _BLOCK}
    own = {"num_ranks": num_ranks, "width": width(num_ranks), **turns}
    return Repeated(_fill, (programs,), (first_key, first_slot, num_words), **own)


# else it would be compiled for some layers apart
@triton.jit(do_not_specialize=["layer", "num_slots"])
def _resolve(
    ids_ptr, table_ptr, owner_ptr, stamp_ptr, unused_ptr, left_ptr, clock_ptr, told_ptr, hits_ptr,
    arrivals_ptr, missing_ptr,
    layer, num_layers, num_experts, num_slots, most_slots,
    num_pairs: tl.constexpr, top_k: tl.constexpr, width: tl.constexpr, kind: tl.constexpr,
    is_ahead: tl.constexpr,
):  # fmt: skip
    """Resolve a layer of a few tokens in one warp.

    The experts needed have the latest stamp before the first victim is chosen. A free slot is taken
    first, then the oldest expert, or the one used least often; of equals the one with the least
    number."""
    clock = tl.load(clock_ptr)
    places = tl.arange(0, width)
    first = layer * num_experts
    is_slot = places < num_slots
    own = layer * most_slots + places
    owners = tl.load(owner_ptr + own, mask=is_slot, other=0)
    chosen_ptr = told_ptr + (_TOLD_AHEAD if is_ahead else _TOLD) * num_layers + layer * top_k
    _note_uses(ids_ptr, stamp_ptr + first, chosen_ptr, clock, top_k, kind)
    stamps = tl.load(stamp_ptr + first + owners, mask=is_slot & (owners >= 0), other=_LEAST)
    for token in range(0, num_pairs, top_k):
        for rank in tl.static_range(top_k):
            slot = tl.load(table_ptr + first + tl.load(ids_ptr + token + rank))
            stamps = tl.where(places == slot, _MOST, stamps)
    # slots that are wanted, and those whose copies may be under way
    wanted = tl.zeros([width], tl.int32)
    fresh = tl.zeros([width], tl.int32)
    num_wanted = 0
    num_loaded = 0
    num_evicted = 0
    num_wasted = 0
    num_collided = 0
    for token in range(0, num_pairs, top_k):
        for rank in tl.static_range(top_k):
            pair = token + rank
            expert = tl.load(ids_ptr + pair).to(tl.int32)
            slot = tl.load(table_ptr + first + expert)
            is_missing = slot < 0
            victim = tl.argmin(
                tl.where(is_slot, stamps.to(tl.int64) * num_experts + owners, _LAST), axis=0
            )
            leaving, is_leaving, owners = _replaced(
                table_ptr + first, owners, places, victim, expert, is_missing
            )
            stamps = tl.where((places == victim) & is_missing, _MOST, stamps)
            slot = tl.where(is_missing, victim, slot)
            is_own = places == slot
            is_coming = is_missing | (tl.sum(tl.where(is_own, fresh, 0), axis=0) != 0)
            if is_ahead:
                is_coming |= tl.load(unused_ptr + first + expert) != 0
                tl.store(unused_ptr + first + expert, 0)
            tl.store(hits_ptr + pair, tl.where(is_coming, -1, slot))
            tl.store(arrivals_ptr + pair, tl.where(is_coming, slot, -1))
            tl.store(missing_ptr + pair, tl.where(is_missing, expert, -1))
            num_wanted += 1 - tl.sum(tl.where(is_own, wanted, 0), axis=0)
            wanted = tl.where(is_own, 1, wanted)
            fresh = tl.where(is_own & is_coming, 1, fresh)
            num_loaded += is_missing.to(tl.int32)
            num_evicted += is_leaving.to(tl.int32)
            if is_ahead:
                num_wasted += _wasted(unused_ptr + first + leaving, is_leaving)
                num_collided += (is_missing & (tl.load(left_ptr + first + expert) == clock)).to(
                    tl.int32
                )
            tl.debug_barrier()  # the next rank reads the table
    tl.store(owner_ptr + own, owners, mask=is_slot)
    _add(told_ptr + layer, num_loaded)
    _add(told_ptr + num_layers + layer, num_evicted)
    _add(told_ptr + ((_TOLD_AHEAD if is_ahead else _TOLD) - 1) * num_layers + layer, num_wanted)
    if is_ahead:
        _add(told_ptr + 3 * num_layers + layer, num_wasted)
        _add(told_ptr + 4 * num_layers + layer, num_collided)


@triton.jit
def _note_uses(
    ids_ptr, stamp_ptr, chosen_ptr, clock, top_k: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Stamp a token's experts, of the layer that all pointers point to, or write down which they
    are."""
    for rank in tl.static_range(top_k):
        expert = tl.load(ids_ptr + rank).to(tl.int32)
        if kind == "last use":
            tl.store(stamp_ptr + expert, clock)
        elif kind == "uses":
            _add(stamp_ptr + expert, 1)
        else:
            tl.store(chosen_ptr + rank, expert)
    tl.debug_barrier()  # what was written is read by other threads


@triton.jit(do_not_specialize=["layer", "target", "num_slots", "most"])
def _resolve_ahead(
    p_ptr, table_ptr, owner_ptr, stamp_ptr, unused_ptr, left_ptr, clock_ptr, told_ptr, slots_ptr,
    missing_ptr,
    layer, target, num_layers, num_experts, num_slots, most_slots, most,
    num_named: tl.constexpr, least: tl.constexpr, width: tl.constexpr, num_p: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Resolve a prefetch in one warp.

    All named experts are kept before the first victim is chosen. Of equals, the one with the least
    number is named first, and evicted first. An expert that finds no slot is not sent for."""
    clock = tl.load(clock_ptr)
    first = target * num_experts
    places = tl.arange(0, width)
    experts = tl.arange(0, num_p)
    is_slot = places < num_slots
    own = target * most_slots + places
    owners = tl.load(owner_ptr + own, mask=is_slot, other=0)
    p = tl.load(p_ptr + experts, mask=experts < num_experts, other=-float("inf"))
    turns = tl.arange(0, block)
    named = tl.zeros([block], tl.int32)
    num_likely = tl.sum((p >= least).to(tl.int32), axis=0)  # named first, since they have the most
    is_kept = ~is_slot
    for turn in tl.static_range(num_named):
        best = tl.argmax(p, axis=0)
        named = tl.where(turns == turn, best, named)
        is_kept = is_kept | ((owners == best) & (turn < num_likely))
        p = tl.where(experts == best, -float("inf"), p)
    stamps = tl.load(stamp_ptr + first + owners, mask=is_slot & (owners >= 0), other=_LEAST)
    num_sent = 0
    num_evicted = 0
    num_wasted = 0
    for turn in tl.static_range(num_named):
        expert = tl.sum(tl.where(turns == turn, named, 0), axis=0)
        ages = tl.where(is_kept, _LAST, stamps.to(tl.int64) * num_experts + owners)
        victim = tl.argmin(ages, axis=0)
        is_sent = (
            (tl.load(table_ptr + first + expert) < 0)
            & (turn < num_likely)
            & (num_sent < most)
            & (tl.min(ages, axis=0) < _LAST)
        )
        leaving, is_leaving, owners = _replaced(
            table_ptr + first, owners, places, victim, expert, is_sent
        )
        is_kept = is_kept | ((places == victim) & is_sent)
        tl.store(left_ptr + first + leaving, clock, mask=is_leaving)
        num_wasted += _wasted(unused_ptr + first + leaving, is_leaving)
        tl.store(unused_ptr + first + expert, 1, mask=is_sent)
        tl.store(slots_ptr + turn, victim)
        tl.store(missing_ptr + turn, tl.where(is_sent, expert, -1))
        num_sent += is_sent.to(tl.int32)
        num_evicted += is_leaving.to(tl.int32)
        tl.debug_barrier()  # the next one reads the table
    tl.store(owner_ptr + own, owners, mask=is_slot)
    _add(told_ptr + num_layers + layer, num_evicted)
    _add(told_ptr + 2 * num_layers + layer, num_sent)
    _add(told_ptr + 3 * num_layers + layer, num_wasted)


@triton.jit
def _add(number_ptr, amount):
    tl.store(number_ptr, tl.load(number_ptr) + amount)


@triton.jit
def _replaced(table_ptr, owners, places, victim, expert, is_coming):
    """Give an expert that is coming the slot `victim`. Return the expert that leaves it, whether
    there is one, and the new owners of all slots."""
    leaving = tl.sum(tl.where(places == victim, owners, 0), axis=0)
    is_leaving = is_coming & (leaving >= 0)
    tl.store(table_ptr + leaving, -1, mask=is_leaving)
    tl.store(table_ptr + expert, victim, mask=is_coming)
    return leaving, is_leaving, tl.where((places == victim) & is_coming, expert, owners)


@triton.jit
def _wasted(unused_ptr, is_leaving):
    """Return 1 if the expert that leaves was prefetched and never used, otherwise 0; it no longer
    counts as unused."""
    count = tl.load(unused_ptr, mask=is_leaving, other=0)
    tl.store(unused_ptr, 0, mask=is_leaving)
    return count


@triton.jit(do_not_specialize=["first_key", "first_slot"])
def _fill(
    host_ptr, starts_ptr, arena_ptr, slots_ptr, missing_ptr, first_key, first_slot, num_words,
    num_ranks: tl.constexpr, width: tl.constexpr,
    programs: tl.constexpr, turns: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Copy some words of each missing expert, one expert after another. The next words are
    requested before those that have come are stored."""
    ranks = tl.arange(0, width)
    missing = tl.load(missing_ptr + ranks, mask=ranks < num_ranks, other=-1)
    slots = tl.load(slots_ptr + ranks, mask=ranks < num_ranks, other=-1)
    for rank in range(num_ranks):
        expert = tl.max(tl.where(ranks == rank, missing, -1), axis=0)
        if expert >= 0:
            slot = tl.max(tl.where(ranks == rank, slots, -1), axis=0)
            source = host_ptr + (first_key + expert).to(tl.int64) * num_words
            target = arena_ptr + expert_start(starts_ptr, first_slot + slot)
            places = tl.program_id(0) * block + tl.arange(0, block)
            words = tl.load(source + places, mask=places < num_words)
            for _ in range(1, turns):
                following = places + programs * block
                coming = tl.load(source + following, mask=following < num_words)
                tl.store(target + places, words, mask=places < num_words)
                places = following
                words = coming
            tl.store(target + places, words, mask=places < num_words)
