"""Parts of an attention module that compiled code supports, recognised by the module's children,
not by its name."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from runtime.devices import kind_of
from runtime.kernels.decoder.norms import Compiled, Norm, recognise_norm
from runtime.model.quantised.quantised_linear import QuantisedLinear, dtype_of, stored

_NORMS = (
    ("q_norm", "k_norm"),
    ("q_layernorm", "k_layernorm"),
    ("query_layernorm", "key_layernorm"),
)
_OUTPUTS = ("o_proj", "out_proj")


@dataclass(frozen=True, slots=True)
class Heads:
    """Linear layers, norms and sizes of an attention: `count` heads of `dim` numbers (`value_dim`
    in values). `groups` heads share the same keys. `sinks` [N] is float32."""

    query: nn.Linear | QuantisedLinear
    key: nn.Linear | QuantisedLinear
    value: nn.Linear | QuantisedLinear
    output: nn.Linear | QuantisedLinear
    norms: tuple[Norm, Norm] | None
    sinks: torch.Tensor | None
    count: int
    groups: int
    dim: int
    value_dim: int
    scaling: float

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.query)

    @property
    def linear(self) -> tuple[nn.Linear, ...]:
        return self.query, self.key, self.value, self.output

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes in the order that kernels take: heads, groups, dim, value_dim."""
        return self.count, self.groups, self.dim, self.value_dim

    @property
    def sinks_address(self) -> int:
        return 0 if self.sinks is None else self.sinks.data_ptr()


@dataclass(frozen=True, slots=True)
class Rotation:
    """Way of rotating heads by their position.

    `is_still`: heads are not rotated. `is_paired`: neighbours are rotated together, otherwise the
    first half with the second. `is_each`: each number has its own angle, otherwise each pair.
    `is_half`: as many angles are given as there are pairs, otherwise twice as many. `is_wide`:
    nothing is rounded in between. `is_late`: the rotation comes before the norm, otherwise after
    it."""

    is_paired: bool = False
    is_each: bool = False
    is_half: bool = False
    is_wide: bool = False
    is_late: bool = False
    is_still: bool = False

    @property
    def order(self) -> tuple[bool, bool, bool, bool]:
        """Flags in the order that kernels take: is_late, is_paired, is_each, is_wide."""
        return self.is_late, self.is_paired, self.is_each, self.is_wide


_ANGLES = tuple(
    {"is_paired": is_paired, "is_each": is_each, "is_half": is_half}
    for is_paired, is_each, is_half in product((False, True), repeat=3)
    if not is_each or is_paired and not is_half  # halves have the same angles twice
)


def rotations(heads: Heads) -> Iterator[Rotation]:
    """Yield the ways in which model families rotate heads."""
    wide = (False,) if heads.dtype is torch.float32 else (False, True)
    late = (False, True) if heads.norms else (False,)
    yield Rotation(is_still=True)
    for angles, is_wide, is_late in product(_ANGLES, wide, late):
        yield Rotation(**angles, is_wide=is_wide, is_late=is_late)


def recognise_heads(module: nn.Module, compiled: Compiled) -> Heads | str:
    """Return the parts of an attention, or the reason why compiled code cannot compute it."""
    children = dict(module.named_children())
    output = next((name for name in _OUTPUTS if name in children), _OUTPUTS[0])
    linear = [children.pop(name, None) for name in ("q_proj", "k_proj", "v_proj", output)]
    if not all(type(layer) in (nn.Linear, QuantisedLinear) for layer in linear):
        return "projections of another kind"
    dtype = dtype_of(linear[0])
    weights = stored(linear[0])
    if not compiled.takes(weights, dtype):
        return f"{dtype} on {kind_of(weights.device)}"
    named = next((pair for pair in _NORMS if set(pair) <= children.keys()), ())
    norms = [recognise_norm(children.pop(name), dtype, compiled) for name in named]
    further = [
        *children,
        *(name for name, _ in module.named_parameters(recurse=False) if name != "sinks"),
    ]
    if further or None in norms:
        return f"further parts: {', '.join(further)}" if further else "norms of another kind"
    return _sized(module, linear, tuple(norms) or None)


def _sized(
    module: nn.Module, linear: list[nn.Linear], norms: tuple[Norm, Norm] | None
) -> Heads | str:
    query, key, value, output = linear
    dim = getattr(module, "head_dim", 0)
    sinks = getattr(module, "sinks", None)
    count, num_keys = (layer.out_features // dim if dim else 0 for layer in (query, key))
    value_dim = value.out_features // num_keys if num_keys else 0
    found = (query.out_features, key.out_features, value.out_features, output.in_features)
    is_known = found == (count * dim, num_keys * dim, num_keys * value_dim, count * value_dim)
    if not is_known or not count or count % num_keys:
        return "heads of unknown size"
    if any(
        len(norm.weight) not in (dim, total)
        for norm, total in zip(norms or (), found[:2], strict=False)
    ):
        return "norms of unknown width"
    return Heads(
        *linear,
        norms=norms,
        sinks=None if sinks is None else sinks.detach().float(),
        count=count,
        groups=count // num_keys,
        dim=dim,
        value_dim=value_dim,
        scaling=float(getattr(module, "scaling", dim**-0.5)),
    )


def key_of(
    heads: Heads, rotation: Rotation, x: torch.Tensor, angles: tuple[torch.Tensor, ...] | None
) -> torch.Tensor:
    """Return a token's key [Nk, D], float32 and nowhere rounded: it shows how heads are rotated
    without compiled code."""
    key = heads.key(x).float().view(-1, heads.dim)
    norm = heads.norms[1] if heads.norms else None
    if norm and not rotation.is_late:
        key = _normalised(key, norm)
    if angles is not None and not rotation.is_still:
        key = _turned(key, rotation, *(each.float().flatten() for each in angles))
    return _normalised(key, norm) if norm and rotation.is_late else key


def _normalised(key: torch.Tensor, norm: Norm) -> torch.Tensor:
    rows = key.reshape(-1, len(norm.weight))
    scale = torch.rsqrt(rows.square().mean(1, keepdim=True) + norm.eps)
    return (rows * scale * norm.weight).view_as(key)


def _turned(
    key: torch.Tensor, rotation: Rotation, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    half = len(cos) if rotation.is_half else len(cos) // 2
    part = key[:, : 2 * half]
    first, second = (part[:, ::2], part[:, 1::2]) if rotation.is_paired else part.chunk(2, 1)
    of_first, of_second = (slice(0, half),) * 2
    if rotation.is_each:
        of_first, of_second = slice(0, None, 2), slice(1, None, 2)
    turned = (
        first * cos[of_first] - second * sin[of_first],
        second * cos[of_second] + first * sin[of_second],
    )
    joined = torch.stack(turned, -1).flatten(1) if rotation.is_paired else torch.cat(turned, 1)
    return torch.cat([joined, key[:, 2 * half :]], 1)
