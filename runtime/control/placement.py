"""Placements of layers: the keys wanted resident, which of them are still absent, and which others
have to leave."""

from runtime.control.cache import ABSENT, RESIDENT, Cache


class Placements:
    """The keys `wanted` in each layer that was placed anew, until all of them are resident or in
    flight."""

    def __init__(self) -> None:
        self.wanted: dict[int, list[int]] = {}

    def want(self, layer: int, keys: list[int]) -> None:
        """Set the keys that are to be resident in a layer; all others of the layer are to be
        evicted."""
        self.wanted[layer] = keys

    def clear(self) -> None:
        self.wanted.clear()

    def leaving(self, cache: Cache, layer: int) -> list[int]:
        """Return the residents of a layer that are neither wanted nor pinned, ascending."""
        if layer not in self.wanted:
            return []
        num_experts = cache.shape.num_experts
        others = set(range(layer * num_experts, (layer + 1) * num_experts)).difference(
            self.wanted[layer]
        )
        return [
            key for key in sorted(others) if cache.states[key] == RESIDENT and not cache.pins[key]
        ]

    def coming(self, cache: Cache, layer: int) -> list[int]:
        """Return the wanted keys of a layer that are absent."""
        return [key for key in self.wanted.get(layer, ()) if cache.states[key] == ABSENT]

    def end(self, layer: int) -> None:
        """Note that all the wanted keys of a layer are resident or in flight."""
        self.wanted.pop(layer, None)
