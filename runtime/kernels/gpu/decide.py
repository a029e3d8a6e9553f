"""Triton kernels that decide on the device which expert of a layer goes, and bring the missing ones: no host waits.

`resolve` decides one token's layer as the eviction policy `lru` does, or `lfu`, ties included, so that a replay with
that policy counts the same; `fill` copies what is missing from page-locked memory, which the GPU reads itself. Both
depend on device memory alone, so that a CUDA graph can contain them. Sessions use them with `--decide device`; they
have not run on a GPU. Importing this module imports triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from runtime.kernels.gpu.blocks import expert_start
from runtime.kernels.gpu.repeated import Repeated, blocks, width

_BLOCK = 4096  # words of one program of `fill`
_MOST = tl.constexpr((1 << 31) - 1)


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """The slots of every layer: `table` [L, E] is the slot of each expert in its layer, `owner` [L, S] the
    expert of each slot, below 0 for none; `stamp` [L, S] is when it was last used, by `clock` [1], which the caller
    moves on from token to token; with `counts_uses` `stamp` [L, E] is how often each expert was used instead. `counts`
    [2, L] adds up loads and evictions. All int32.

    A layer has the first of its S places, as many as `num_slots` says: at least as many as a token has experts."""

    table: torch.Tensor
    owner: torch.Tensor
    stamp: torch.Tensor
    clock: torch.Tensor
    counts: torch.Tensor
    num_slots: Sequence[int]
    counts_uses: bool = False

    @classmethod
    def holding(
        cls,
        table: torch.Tensor,
        owner: torch.Tensor,
        stamp: torch.Tensor,
        num_slots: Sequence[int],
        *,
        counts_uses: bool = False,
    ) -> "DeviceCache":
        """A cache that holds what these tensors say, with its clock and its counts at 0."""
        clock, counts = table.new_zeros(1), table.new_zeros(2, len(table))
        return cls(table, owner, stamp, clock, counts, num_slots, counts_uses)

    def hold(self, table: torch.Tensor, owner: torch.Tensor, stamp: torch.Tensor) -> None:
        """Hold from here on what these tensors say, at the same addresses."""
        for own, new in ((self.table, table), (self.owner, owner), (self.stamp, stamp)):
            own.copy_(new)
        self.clock.zero_()
        self.counts.zero_()


def resolve(cache: DeviceCache, layer: int, ids: torch.Tensor, slots: torch.Tensor, missing: torch.Tensor) -> None:
    """Find or make a slot for each of a token's experts `ids` [K], which differ: write `slots` [K] int32, of the layer,
    and `missing` [K] int32, the expert that must be brought there or -1."""
    (num_layers, num_experts), (_, most_slots) = cache.table.shape, cache.owner.shape
    sizes = layer, num_layers, num_experts, cache.num_slots[layer], most_slots
    launch = _resolving(*sizes, ids.numel(), cache.counts_uses)
    launch((ids, cache.table, cache.owner, cache.stamp, cache.clock, cache.counts, slots, missing))


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
    """Copy the `missing` [K] experts of a layer from `host` [L * E, words] int32, page-locked, into their `slots` [K].
    `starts` by slot of all layers: where it begins in `arena`, int32, in words. The layer's first expert and slot are
    `first_key` and `first_slot`."""
    launch = _filling(first_key, first_slot, host.shape[1], slots.numel())
    launch((host, starts, arena, slots, missing))


@cache
def _resolving(
    layer: int, num_layers: int, num_experts: int, num_slots: int, most_slots: int, top_k: int, counts_uses: bool
) -> Repeated:
    sizes = layer, num_layers, num_experts, num_slots, most_slots
    own = {"top_k": top_k, "width": width(most_slots), "counts_uses": counts_uses}
    return Repeated(_resolve, (1,), sizes, **own, num_warps=1)


@cache
def _filling(first_key: int, first_slot: int, num_words: int, top_k: int) -> Repeated:
    return Repeated(_fill, (blocks(num_words, _BLOCK), top_k), (first_key, first_slot, num_words), block=_BLOCK)


@triton.jit(do_not_specialize=["layer", "num_slots"])  # else it would be compiled for some layers apart
def _resolve(
    ids_ptr, table_ptr, owner_ptr, stamp_ptr, clock_ptr, counts_ptr, slots_ptr, missing_ptr,
    layer, num_layers, num_experts, num_slots, most_slots,
    top_k: tl.constexpr, width: tl.constexpr, counts_uses: tl.constexpr,
):  # fmt: skip
    """One warp. What is needed has the latest stamp before the first victim is chosen; of equally old ones, or of those
    used equally often, that with the least number goes, and before all of them a free slot."""
    latest, places = tl.load(clock_ptr), tl.arange(0, width)
    is_slot, own = places < num_slots, layer * most_slots + places
    owners = tl.load(owner_ptr + own, mask=is_slot, other=0)
    row_ptr = table_ptr + layer * num_experts
    if counts_uses:
        stamps, latest = _used(ids_ptr, stamp_ptr + layer * num_experts, owners, is_slot, top_k), _MOST + latest * 0
    else:
        stamps = tl.load(stamp_ptr + own, mask=is_slot, other=0)
    for rank in tl.static_range(top_k):
        slot = tl.load(row_ptr + tl.load(ids_ptr + rank))
        stamps = tl.where(places == slot, latest, stamps)
    num_loaded, num_evicted = 0, 0
    for rank in tl.static_range(top_k):
        expert = tl.load(ids_ptr + rank).to(tl.int32)
        slot = tl.load(row_ptr + expert)
        is_missing = slot < 0
        ages = stamps.to(tl.int64) * num_experts + owners
        victim = tl.argmin(tl.where(is_slot, ages, 9223372036854775807), axis=0)
        leaving = tl.sum(tl.where(places == victim, owners, 0), axis=0)
        tl.store(row_ptr + leaving, -1, mask=is_missing & (leaving >= 0))
        tl.store(row_ptr + expert, victim, mask=is_missing)
        is_taken = (places == victim) & is_missing
        stamps, owners = tl.where(is_taken, latest, stamps), tl.where(is_taken, expert, owners)
        tl.store(slots_ptr + rank, tl.where(is_missing, victim, slot))
        tl.store(missing_ptr + rank, tl.where(is_missing, expert, -1))
        num_loaded += is_missing.to(tl.int32)
        num_evicted += (is_missing & (leaving >= 0)).to(tl.int32)
        tl.debug_barrier()  # the next rank reads the table
    if not counts_uses:
        tl.store(stamp_ptr + own, stamps, mask=is_slot)
    tl.store(owner_ptr + own, owners, mask=is_slot)
    _add(counts_ptr + layer, num_loaded)
    _add(counts_ptr + num_layers + layer, num_evicted)


@triton.jit
def _add(number_ptr, amount):
    tl.store(number_ptr, tl.load(number_ptr) + amount)


@triton.jit
def _used(ids_ptr, uses_ptr, owners, is_slot, top_k: tl.constexpr):
    """Count the uses of a token's experts. Returns how often the expert of each slot was used; -1 for a free slot."""
    for rank in tl.static_range(top_k):
        _add(uses_ptr + tl.load(ids_ptr + rank), 1)
    tl.debug_barrier()  # what was written is read by other threads
    return tl.load(uses_ptr + owners, mask=is_slot & (owners >= 0), other=-1)


@triton.jit(do_not_specialize=["first_key", "first_slot"])
def _fill(
    host_ptr, starts_ptr, arena_ptr, slots_ptr, missing_ptr, first_key, first_slot, num_words, block: tl.constexpr
):
    """Copy some words of one rank's expert; a rank that misses nothing ends at once."""
    rank = tl.program_id(1)
    expert = tl.load(missing_ptr + rank)
    if expert >= 0:
        places = tl.program_id(0) * block + tl.arange(0, block)
        source = host_ptr + (first_key + expert).to(tl.int64) * num_words
        target = arena_ptr + expert_start(starts_ptr, first_slot + tl.load(slots_ptr + rank))
        words = tl.load(source + places, mask=places < num_words)
        tl.store(target + places, words, mask=places < num_words)
