"""Room behind the keys and values of a cache's layer. A token's are written there; torch would copy
the whole layer."""

import torch
from transformers.cache_utils import DynamicLayer

CacheOperand = tuple[int, int, int, int, int]
"""What kernels take of a cache: the address of the first head's keys, how many numbers apart heads
lie, the same of its values, and the number of positions."""

_NAME = "moectl_room"
_LEAST = 64  # positions


class CacheRoom:
    """Memory [1, N, C, D] of which the layer's keys and values [1, N, S, D] are the first
    positions.

    It is used as long as the layer has the very tensors that were given to it last: if it is
    cropped, or a copy of it goes on from the same tensors, it gets room anew.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._capacity = keys.shape[2] + max(_LEAST, keys.shape[2] // 4)
        self._buffers = tuple(self._with_room(cached) for cached in (keys, values))
        self._given = (keys, values)
        self._places = tuple(
            place for buffer in self._buffers for place in (buffer.data_ptr(), buffer.stride(1))
        )

    def _with_room(self, cached: torch.Tensor) -> torch.Tensor:
        batch, heads, num_positions, dim = cached.shape
        buffer = torch.empty(batch, heads, self._capacity, dim, dtype=cached.dtype)
        buffer.narrow(2, 0, num_positions).copy_(cached)
        return buffer

    def _belongs_to(self, layer: DynamicLayer) -> bool:
        keys, values = self._given
        return layer.keys is keys and layer.values is values and keys.shape[2] < self._capacity

    def __deepcopy__(self, _: dict) -> None:
        """A copied layer gets room anew: the addresses here are of this layer's memory."""

    @classmethod
    def of(cls, layer: DynamicLayer) -> "CacheRoom":
        """The room of this layer, with place for a position more."""
        room = vars(layer).get(_NAME)
        if room is None or not room._belongs_to(layer):
            room = cls(layer.keys, layer.values)
            setattr(layer, _NAME, room)
        return room

    def extend(self, layer: DynamicLayer) -> CacheOperand:
        """Give the layer a position more, the numbers of which are to be written."""
        operand = self.operand(layer)
        layer.keys, layer.values = self._given = tuple(
            buffer.narrow(2, 0, operand[-1]) for buffer in self._buffers
        )
        return operand

    def operand(self, layer: DynamicLayer) -> CacheOperand:
        """What kernels take to write the numbers of the position that `extend` will give."""
        return *self._places, layer.keys.shape[2] + 1
