"""Keys and values of a sequence at few bits, and the bytes of a cache.

They are packed when they are written, and unpacked whole when they are read: attention is the
model's own, on numbers that are near its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from artifacts.errors import BadUsage
from artifacts.modelshapes.kv_cache import group_of, kv_bits

_MOST = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True, eq=False)
class KvCoding:
    """Which layers keep keys and values at `bits` bits: those that keep all of a sequence and no
    more. `kinds` has the width of a head and the dtype of what was packed, by layer and tensor."""

    bits: int
    layers: frozenset[int]
    num_others: int = 0
    kinds: dict[tuple[int, str], tuple[int, torch.dtype]] = field(default_factory=dict)

    def pack(self, layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return keys or values [..., D] of a layer as bytes [..., P]; those of a layer that keeps
        its own as they are. Zero bytes stand for zeros."""
        if layer not in self.layers:
            return x
        self.kinds[layer, name] = x.shape[-1], x.dtype
        return packed(x, self.bits)

    def unpack(self, layer: int, name: str, kept: torch.Tensor) -> torch.Tensor:
        """Return keys or values [..., D] that were packed to [..., P]."""
        if layer not in self.layers:
            return kept
        width, dtype = self.kinds[layer, name]
        return unpacked(kept, width, self.bits, dtype)

    def cache(self, model: PreTrainedModel) -> DynamicCache:
        """Return an empty cache of a model."""
        cache = DynamicCache(config=model.config)
        self.take_over(cache)
        return cache

    def take_over(self, cache: Cache) -> None:
        """Have an empty cache keep these layers at few bits."""
        for index in self.layers:
            cache.layers[index] = PackedLayer(index, self)


def coding_of(model: PreTrainedModel, name: str) -> KvCoding | None:
    """Return how a model keeps keys and values of the type `name`; None as it computes them. Raises
    BadUsage for an unknown name, and for a model none of whose layers can."""
    bits = kv_bits(name)
    if bits is None:
        return None
    layers = DynamicCache(config=model.config).layers
    plain = frozenset(index for index, one in enumerate(layers) if type(one) is DynamicLayer)
    if not plain or not model._supports_default_dynamic_cache():
        raise BadUsage(
            f"--kv-cache-dtype {name}: layers of {model.config.model_type} keep windows, states or "
            "an index and no plain keys and values: leave it out"
        )
    return KvCoding(bits, plain, len(layers) - len(plain))


class PackedLayer(DynamicLayer):
    """A layer whose keys and values [1, A, S, P] are bytes."""

    def __init__(self, index: int, coding: KvCoding) -> None:
        super().__init__()
        self._index = index
        self._coding = coding

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values [1, A, S, D]; returns all of the sequence as attention reads them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._added("keys", key_states)
        self.values = self._added("values", value_states)
        return (
            self._coding.unpack(self._index, "keys", self.keys),
            self._coding.unpack(self._index, "values", self.values),
        )

    def _added(self, name: str, new: torch.Tensor) -> torch.Tensor:
        held = getattr(self, name)
        kept = self._coding.pack(self._index, name, new)
        return torch.cat([held, kept], dim=-2) if held.numel() else kept


def packed(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return numbers [..., D] as bytes [..., P]: codes of each group from its least number on, in
    equal steps, then the steps and the least numbers of all groups in float16."""
    width = x.shape[-1]
    groups = x.unflatten(-1, (-1, group_of(width))).float()
    least = groups.amin(-1, keepdim=True).clamp(-_MOST, _MOST).half()
    most = groups.amax(-1, keepdim=True)
    steps = (1 << bits) - 1
    step = ((most - least.float()) / steps).clamp(0, _MOST).half()
    codes = ((groups - least.float()) / step.float()).nan_to_num(0).round().clamp(0, steps)
    codes = codes.to(torch.uint8).flatten(-2)
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    sides = [each.squeeze(-1).contiguous().view(torch.uint8) for each in (step, least)]
    return torch.cat([codes, *sides], dim=-1)


def unpacked(kept: torch.Tensor, width: int, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers [..., D] of bytes [..., P]."""
    num_codes = width * bits // 8
    codes = kept[..., :num_codes]
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    step, least = kept[..., num_codes:].contiguous().view(torch.float16).float().chunk(2, dim=-1)
    groups = codes.unflatten(-1, (-1, group_of(width))).float()
    return torch.addcmul(least[..., None], groups, step[..., None]).flatten(-2).to(dtype)


def cache_nbytes(cache: Cache) -> int:
    """Return the bytes of the keys, values and states that a cache holds."""
    return sum(one.nbytes for layer in cache.layers for one in _tensors(layer))


def _tensors(layer: object) -> Iterator[torch.Tensor]:
    for held in [*vars(layer).values()]:
        several = [*held.values()] if isinstance(held, dict) else [held]
        yield from (one for one in several if isinstance(one, torch.Tensor))
