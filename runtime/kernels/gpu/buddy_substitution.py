"""Buddy substitution on a GPU: one program a token, the same answer as `runtime.policies.miss.buddy.substitute`.

What the host decides so far costs a step the copy of the router's choice and a wait for it; here nothing leaves the
device. No time has been measured on a GPU yet: tools.gpu.bench does. Whoever imports this module imports triton.
"""

import torch
import triton
import triton.language as tl


def substitute(selected: torch.Tensor, resident: torch.Tensor, buddies: torch.Tensor, max_rank: int) -> torch.Tensor:
    """selected [T, K] and buddies [E, R] expert ids, the latter padded with -1, resident [E] bool -> selected' [T, K].

    All on one device; `selected` stays as it is.
    """
    out = torch.empty_like(selected)
    num_tokens, top_k = selected.shape
    reach = min(max_rank, buddies.shape[1])
    if num_tokens:
        _substitute[(num_tokens,)](
            selected,
            resident.view(torch.uint8),
            buddies,
            out,
            top_k,
            buddies.shape[1],
            reach,
            width=triton.next_power_of_2(top_k),
            most=triton.next_power_of_2(max(1, reach)),
            num_warps=1,
        )
    return out


@triton.jit
def _substitute(
    selected_ptr, resident_ptr, buddies_ptr, out_ptr, top_k, num_buddies, reach, width: tl.constexpr, most: tl.constexpr
):
    """Ranks from the strongest down: a rank takes the first buddy that is resident and that the token does not use."""
    first = tl.program_id(0) * top_k
    ranks, order = tl.arange(0, width), tl.arange(0, most)
    chosen = tl.load(selected_ptr + first + ranks, mask=ranks < top_k, other=-1)
    for rank in range(top_k):
        own = tl.sum(tl.where(ranks == rank, chosen, 0), axis=0)
        is_absent = tl.load(resident_ptr + own) == 0
        peers = tl.load(buddies_ptr + own * num_buddies + order, mask=(order < reach) & is_absent, other=-1)
        is_resident = tl.load(resident_ptr + peers, mask=peers >= 0, other=0) != 0
        is_used = tl.sum((peers[:, None] == chosen[None, :]).to(tl.int32), axis=1) > 0
        best = tl.min(tl.where(is_resident & (is_used == 0), order, most), axis=0)
        stand_in = tl.sum(tl.where(order == best, peers, 0), axis=0)
        chosen = tl.where((ranks == rank) & (best < most), stand_in.to(chosen.dtype), chosen)
    tl.store(out_ptr + first + ranks, chosen, mask=ranks < top_k)
