"""Choice of each token's experts from a router's logits, in a Triton kernel. Importing this module
imports triton."""

import torch
import triton
import triton.language as tl

from runtime.kernels.decoder.routers import RouterOutput
from runtime.kernels.gpu.repeated import Repeated, blocks, width

_LOGITS = 256  # of a program, unless a token has more


class RoutingKernel:
    """The kernel for one kind of router, with `num_experts` experts."""

    def __init__(self, output: RouterOutput, num_experts: int) -> None:
        self._output = output
        self._block = width(num_experts)
        self._num_experts = num_experts
        self._of_one = self._launch(1, 1)

    def route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits [T, E], weights and ids [T, K] as the router gives them, for the product of
        its matrix and tokens, `logits` [T, E]. Of equal logits the first ones are chosen, as torch
        does on a GPU."""
        own = self._output
        count = len(logits)
        wide = None
        if own.logits_dtype is not logits.dtype:
            wide = torch.empty_like(logits, dtype=own.logits_dtype)
        weights = logits.new_empty(count, own.top_k, dtype=own.weights_dtype)
        ids = logits.new_empty(count, own.top_k, dtype=torch.int64)
        rows = max(1, _LOGITS // self._block)
        launch = self._of_one if count == 1 else self._launch(count, rows)
        launch((logits, wide, weights, ids))
        return logits if wide is None else wide, weights, ids

    def _launch(self, count: int, rows: int) -> Repeated:
        own = self._output
        return Repeated(
            _choose, (blocks(count, rows),),
            (count, self._num_experts, own.top_k, int(own.is_shared_out)),
            rows=rows, block=self._block, ranks=width(own.top_k), num_warps=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count", "is_shared_out"])
def _choose(
    logits_ptr, wide_ptr, weights_ptr, ids_ptr, count, num_experts, top_k, is_shared_out,
    rows: tl.constexpr, block: tl.constexpr, ranks: tl.constexpr,
):  # fmt: skip
    """Choose the experts of some tokens."""
    token = tl.program_id(0) * rows + tl.arange(0, rows)
    is_token = token < count
    token = token.to(tl.int64)[:, None]
    experts = tl.arange(0, block)[None, :]
    own = token * num_experts + experts
    is_there = is_token[:, None] & (experts < num_experts)
    logits = tl.load(logits_ptr + own, mask=is_there, other=float("-inf")).to(tl.float32)
    if wide_ptr is not None:
        tl.store(wide_ptr + own, logits, mask=is_there)
    places = tl.arange(0, ranks)[None, :]
    chosen = tl.full((rows, ranks), float("-inf"), tl.float32)
    ids = tl.zeros((rows, ranks), tl.int64)
    # NaN would be found nowhere, and an expert beyond the last one be chosen
    left = tl.where(logits == logits, logits, float("-inf"))
    for rank in range(top_k):
        largest, best = tl.max(left, axis=1, return_indices=True)
        chosen = tl.where(places == rank, largest[:, None], chosen)
        ids = tl.where(places == rank, best[:, None].to(tl.int64), ids)
        left = tl.where(experts == best[:, None], float("-inf"), left)
    most = tl.max(chosen, axis=1)[:, None]
    weights = tl.exp(chosen - most)
    total = tl.sum(tl.exp(logits - most), axis=1)
    weights /= tl.where(is_shared_out != 0, tl.sum(weights, axis=1), total)[:, None]
    row = token * top_k + places
    is_there = is_token[:, None] & (places < top_k)
    tl.store(weights_ptr + row, weights.to(weights_ptr.dtype.element_ty), mask=is_there)
    tl.store(ids_ptr + row, ids, mask=is_there)
