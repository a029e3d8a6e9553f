"""Triton kernels that decide on the device which expert of a layer goes, and bring the missing ones: no host waits.

`resolve` decides one token's layer as the eviction policy `lru` does, ties included, so that a replay with that policy
counts the same; `fill` copies what is missing from page-locked memory, which the GPU reads itself. Both depend on
device memory alone, so that a CUDA graph can contain them. No session uses them yet, and they have not run on a GPU.
Importing this module imports triton.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from runtime.kernels.gpu.blocks import expert_start

_BLOCK = 4096  # words of one program of `fill`
FREE = -1


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """The slots of every layer: `table` [L, E] is the slot of each expert in its layer, `owner` [L, S] the
    expert of each slot, FREE for none; `stamp` [L, S] is when it was last used, by `clock` [1], which counts tokens
    from 1; `num_missed` [L] counts loads. All int32."""

    table: torch.Tensor
    owner: torch.Tensor
    stamp: torch.Tensor
    clock: torch.Tensor
    num_missed: torch.Tensor

    @classmethod
    def empty(cls, num_layers: int, num_experts: int, num_slots: int, device: torch.device | str) -> "DeviceCache":
        """`num_slots` of each layer, at least as many as a token has experts."""
        own = {"dtype": torch.int32, "device": device}
        table, owner = (torch.full((num_layers, count), FREE, **own) for count in (num_experts, num_slots))
        return cls(table, owner, torch.zeros_like(owner), torch.zeros(1, **own), torch.zeros(num_layers, **own))


def resolve(cache: DeviceCache, layer: int, ids: torch.Tensor, slots: torch.Tensor, missing: torch.Tensor) -> None:
    """Find or make a slot for each of a token's experts `ids` [K]: write `slots` [K] int32, of the layer, and `missing`
    [K] int32, the expert that must be brought there or FREE."""
    (_, num_experts), (_, num_slots) = cache.table.shape, cache.owner.shape
    _resolve[(1,)](
        ids, cache.table, cache.owner, cache.stamp, cache.clock, cache.num_missed, slots, missing,
        layer, num_experts, num_slots,
        top_k=ids.numel(), width=triton.next_power_of_2(num_slots), num_warps=1,
    )  # fmt: skip


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
    num_words = host.shape[1]
    _fill[(triton.cdiv(num_words, _BLOCK), slots.numel())](
        host, starts, arena, slots, missing, first_key, first_slot, num_words, block=_BLOCK
    )


@triton.jit
def _resolve(
    ids_ptr, table_ptr, owner_ptr, stamp_ptr, clock_ptr, num_missed_ptr, slots_ptr, missing_ptr,
    layer, num_experts, num_slots,
    top_k: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """One warp. What is needed has the latest stamp before the first victim is chosen; of equally old ones that with
    the least number goes, and before all of them a free slot."""
    clock, places = tl.load(clock_ptr), tl.arange(0, width)
    is_slot, own = places < num_slots, layer * num_slots + places
    stamps = tl.load(stamp_ptr + own, mask=is_slot, other=0)
    owners = tl.load(owner_ptr + own, mask=is_slot, other=0)
    row_ptr = table_ptr + layer * num_experts
    for rank in tl.static_range(top_k):
        slot = tl.load(row_ptr + tl.load(ids_ptr + rank))
        stamps = tl.where(places == slot, clock, stamps)
    num_missed = 0
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
        stamps, owners = tl.where(is_taken, clock, stamps), tl.where(is_taken, expert, owners)
        tl.store(slots_ptr + rank, tl.where(is_missing, victim, slot))
        tl.store(missing_ptr + rank, tl.where(is_missing, expert, -1))
        num_missed += is_missing.to(tl.int32)
        tl.debug_barrier()  # the next rank reads the table
    tl.store(stamp_ptr + own, stamps, mask=is_slot)
    tl.store(owner_ptr + own, owners, mask=is_slot)
    tl.store(num_missed_ptr + layer, tl.load(num_missed_ptr + layer) + num_missed)


@triton.jit
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
