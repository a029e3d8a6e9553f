"""One token's experts on a CPU in compiled code: one reading of the weights where they lie, one call for all of them.

It gives what the model's own code gives up to the order of additions within a product: in float32 some 1e-7, in
bfloat16, rounded wherever the module rounds, hardly ever another bit. docs/speed.md has figures.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from artifacts.errors import BadUsage
from artifacts.names import unknown
from artifacts.replicas import FULL_BITS
from runtime.experts import Assigned
from runtime.model import MoeModel
from runtime.plan import NO_SLOT, Place
from runtime.resident import Resident
from runtime.segmenttier import SegmentTier
from runtime.together import gates_by_row

EXACT, FUSED = "exact", "fused"  # the model's own bits, or these kernels
_ALL = Assigned(None, 0)
_AS_NUMPY = {torch.bfloat16: torch.uint16, torch.float32: torch.float32}


def check_experts(name: str) -> None:
    """Raise BadUsage unless it is a way to compute a token's experts."""
    if name not in (EXACT, FUSED):
        raise BadUsage(unknown("way to compute experts", name, (EXACT, FUSED)))


@cache
def fused_kernels() -> ModuleType:
    """Compiled, or loaded, when they are first needed: numba alone takes half a second to import."""
    return import_module("runtime.fused_kernels")


class _Token(NamedTuple):
    """What kernels take last: the token [H], for each expert its row of `y` [K, H], an array of the weights' type."""

    x: np.ndarray
    rows: np.ndarray
    y: np.ndarray
    like: np.ndarray


class Fused:
    """One token at a time: `begin`, `add` what is there as often as it takes, `finish`."""

    def __init__(self, opened: MoeModel, resident: Resident) -> None:
        self._resident, self._num_experts = resident, opened.shape.num_experts
        self._lying = _Segments(resident.slow) if isinstance(resident.slow, SegmentTier) else _Whole(opened)
        self._starts = [slot.data_ptr() for slot in resident.slots]
        self._as_numpy = _AS_NUMPY[opened.store.layout.dtype]
        self._like = torch.empty(0, dtype=self._as_numpy).numpy()
        hidden = opened.layers[0].shapes["down_proj"][0]
        self._token_in = torch.empty(hidden)
        self._x = self._token_in.numpy()
        self._y = np.zeros((opened.shape.top_k, hidden), np.float32)

    @staticmethod
    def suits(opened: MoeModel) -> bool:
        """Whether the experts are of the kind that is compiled: gated by SiLU, without bias, each matrix by rows."""
        module, dtype = opened.layers[0].experts, opened.store.layout.dtype
        is_plain = gates_by_row(module) and module.is_concatenated and not (module.is_transposed or module.has_bias)
        return is_plain and opened.model.device.type == "cpu" and dtype in _AS_NUMPY

    def begin(self, module: nn.Module, hidden: torch.Tensor, experts: Sequence[int], weights: np.ndarray) -> None:
        """A token [1, H] that goes to `experts`, -1 left out, with `weights` [K] float32."""
        ranks = sorted([(expert, rank) for rank, expert in enumerate(experts) if expert >= 0])
        self._module = module
        self._start(hidden, [expert for expert, _ in ranks], weights[[rank for _, rank in ranks]])

    def forward(
        self, hidden: torch.Tensor, experts: Sequence[int], slots: Sequence[int], weights: torch.Tensor
    ) -> torch.Tensor:
        """A token [1, H] whose experts all lie in `slots` and whole, with `weights` [1, K]: [1, H]."""
        order = sorted(range(len(experts)), key=experts.__getitem__)
        self._start(hidden, [experts[rank] for rank in order], weights.float().numpy()[0, order])
        starts = [self._starts[slots[rank]] for rank in order]
        self._lying.multiply((), starts, self._token(np.arange(len(order))))
        return self.finish()

    def assigned(self, expert: int) -> Assigned:
        """The tokens it serves."""
        return _ALL

    def add(self, places: Sequence[Place]) -> None:
        """Compute what lies at `places`, all there."""
        plain = [place for place in places if place.bits == FULL_BITS and place.slot != NO_SLOT]
        if plain:
            self._multiply(plain, [self._starts[place.slot] for place in plain])
        if len(plain) < len(places):
            for place in places:
                if place.bits != FULL_BITS or place.slot == NO_SLOT:
                    y = self._resident.forward(self._module, place, self._hidden)
                    self.add_output(place.key % self._num_experts, y)

    def add_elsewhere(self, place: Place, content: torch.Tensor) -> None:
        """Compute what lies outside the slots, at full precision: `content`, uint8 on the CPU."""
        self._multiply([place], [content.data_ptr()])

    def add_output(self, expert: int, y: torch.Tensor) -> None:
        """An expert's output [1, H], computed elsewhere."""
        self._y[self._rows[expert]] += y.float().numpy()[0]

    def finish(self) -> torch.Tensor:
        """The layer's output [1, H]."""
        out = torch.empty_like(self._hidden)
        fused_kernels().combine(self._y, self._weights, len(self._rows), out.view(self._as_numpy).numpy()[0])
        return out

    def _start(self, hidden: torch.Tensor, experts: list[int], weights: np.ndarray) -> None:
        """`experts` ascending, as the module adds them up."""
        self._hidden, self._weights = hidden, weights
        self._rows = {expert: row for row, expert in enumerate(experts)}
        self._token_in.copy_(hidden[0])
        self._y[: len(experts)] = 0

    def _multiply(self, places: Sequence[Place], starts: list[int]) -> None:
        rows = np.array([self._rows[place.key % self._num_experts] for place in places])
        self._lying.multiply(places, starts, self._token(rows))

    def _token(self, rows: np.ndarray) -> _Token:
        return _Token(self._x, rows, self._y, self._like)


def alone(opened: MoeModel, contents: Sequence[torch.Tensor]) -> Callable[[int], None]:
    """Computes expert number i of `contents`, uint8 on the CPU, on one token and forgets it: to be timed."""
    whole, hidden = _Whole(opened), opened.layers[0].shapes["down_proj"][0]
    like = torch.empty(0, dtype=_AS_NUMPY[opened.store.layout.dtype]).numpy()
    token = _Token(np.zeros(hidden, np.float32), np.zeros(1, np.int64), np.zeros((1, hidden), np.float32), like)
    starts = [content.data_ptr() for content in contents]
    return lambda turn: whole.multiply((), [starts[turn % len(starts)]], token)


class _Whole:
    """Experts as the module has them."""

    def __init__(self, opened: MoeModel) -> None:
        inner, down = opened.store.layout.parts
        self._offsets = inner.offset, down.offset
        self._num_neurons = opened.layers[0].num_neurons

    def multiply(self, places: Sequence[Place], starts: list[int], token: _Token) -> None:
        inner, down = self._offsets
        addresses = np.array([(start + inner, start + down) for start in starts])
        fused_kernels().add_whole(addresses, self._num_neurons, *token)


class _Segments:
    """Segments, a top behind its head."""

    def __init__(self, slow: SegmentTier) -> None:
        itemsize, layout, nbytes = slow.layout.dtype.itemsize, slow.layout, slow.segments.nbytes
        heads = [0 if slow.segments.is_bottom(key) else layout.head * itemsize for key in range(len(nbytes))]
        self._heads = heads
        self._neurons = [(size - head) // (layout.width * itemsize) for size, head in zip(nbytes, heads, strict=True)]

    def multiply(self, places: Sequence[Place], starts: list[int], token: _Token) -> None:
        addresses = np.array([start + self._heads[place.key] for place, start in zip(places, starts, strict=True)])
        neurons = np.array([self._neurons[place.key] for place in places])
        fused_kernels().add_segments(addresses, neurons, *token)
