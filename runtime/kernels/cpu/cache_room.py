"""Room behind the keys and values of a cache's layer. A token's are written there; torch would copy the whole layer."""

import torch
from transformers.cache_utils import DynamicLayer

_NAME = "moectl_room"
_LEAST = 64  # positions


class CacheRoom:
    """Memory [1, N, C, D] of which the layer's keys and values [1, N, S, D] are the first positions.

    It is used as long as the layer has the very tensors that were given to it last: if it is cropped, or a copy of it
    goes on from the same tensors, it gets room anew.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._capacity = keys.shape[2] + max(_LEAST, keys.shape[2] // 4)
        self._buffers = tuple(self._with_room(cached) for cached in (keys, values))
        self._given = (keys, values)
        self.steps = tuple(buffer.stride(1) for buffer in self._buffers)

    def _with_room(self, cached: torch.Tensor) -> torch.Tensor:
        batch, heads, num_positions, dim = cached.shape
        buffer = torch.empty(batch, heads, self._capacity, dim, dtype=cached.dtype)
        buffer.narrow(2, 0, num_positions).copy_(cached)
        return buffer

    def _belongs_to(self, layer: DynamicLayer) -> bool:
        keys, values = self._given
        return layer.keys is keys and layer.values is values and keys.shape[2] < self._capacity

    @classmethod
    def of(cls, layer: DynamicLayer) -> "CacheRoom":
        """The room of this layer, with place for a position more."""
        room = vars(layer).get(_NAME)
        if room is None or not room._belongs_to(layer):
            room = cls(layer.keys, layer.values)
            setattr(layer, _NAME, room)
        return room

    def extend(self, layer: DynamicLayer) -> tuple[int, int]:
        """Give the layer a position more. Returns the addresses of its first head's key and value, to be written;
        those of other heads lie `steps` numbers apart."""
        place = layer.keys.shape[2]
        layer.keys, layer.values = self._given = tuple(buffer.narrow(2, 0, place + 1) for buffer in self._buffers)
        key, value = (buffer.data_ptr() + place * buffer.stride(2) * buffer.element_size() for buffer in self._buffers)
        return key, value
