"""Room behind the keys and values of a cache's layer, for those of the next tokens; torch would
copy the whole layer."""

import torch
from transformers.cache_utils import DynamicLayer

CacheOperand = tuple[int, int, int, int, int]
"""A cache as kernels take it: the address of the first head's keys, the distance between heads in
numbers, the same two for its values, and the number of positions."""

_NAME = "moectl_room"
_LEAST = 64  # positions


class CacheRoom:
    """Memory [1, N, C, D] whose first positions are the layer's keys and values [1, N, S, D].

    It is used as long as the layer has the very tensors that were given to it last. If the layer is
    cropped, or a copy of it goes on from the same tensors, it gets new room.
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

    def __deepcopy__(self, _: dict) -> None:
        """Return None: a copied layer gets new room, because the addresses here are of this layer's
        memory."""

    @classmethod
    def of(cls, layer: DynamicLayer) -> "CacheRoom":
        """Return the room of this layer, with space for one more position."""
        room = vars(layer).get(_NAME)
        if room is not None:
            keys, values = room._given
            is_same = layer.keys is keys and layer.values is values
            if is_same and keys.shape[2] < room._capacity:
                return room
        room = cls(layer.keys, layer.values)
        setattr(layer, _NAME, room)
        return room

    def extend(self, layer: DynamicLayer) -> CacheOperand:
        """Give the layer one more position, whose numbers are to be written, and return the
        operand."""
        operand = self.operand(layer)
        keys, values = self._buffers
        layer.keys = keys.narrow(2, 0, operand[-1])
        layer.values = values.narrow(2, 0, operand[-1])
        self._given = (layer.keys, layer.values)
        return operand

    def operand(self, layer: DynamicLayer) -> CacheOperand:
        """Return the operand with which kernels write the numbers of the position that `extend`
        will add."""
        return *self._places, layer.keys.shape[2] + 1
