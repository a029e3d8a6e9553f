"""The matrices of an expert's replicas as tensors with names and texts about them, and back."""

import re
from collections.abc import Mapping

import torch

from artifacts.quantisation.packing import PARTS, Packed, packed_shapes
from artifacts.quantisation.trellis import trellis
from artifacts.quantisation.trellis.trellis import HALF_BITS, Trellis, trellis_shapes
from artifacts.quantisation.widths import Width, label

_NUMBER = re.compile("[1-9][0-9]{0,8}")
_FIELDS = {Packed: PARTS, Trellis: trellis.PARTS}

Parts = dict[str, Packed | Trellis | torch.Tensor]


def is_trellis(replicas: Mapping[Width, Parts]) -> bool:
    """Return whether the matrices are in trellis codes."""
    return any(isinstance(part, Trellis) for parts in replicas.values() for part in parts.values())


def named(replicas: Mapping[Width, Parts]) -> list[tuple[str, torch.Tensor]]:
    """All tensors in file order: by width, and wide types first so that every tensor is aligned to
    its type."""
    tensors_by_name = []
    for bits, parts in sorted(replicas.items()):
        of_width = []
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                of_width.append((f"{label(bits)}.{name}", part))
            else:
                tensors = {field: getattr(part, field) for field in _FIELDS[type(part)]}
                of_width += [
                    (f"{label(bits)}.{name}.{field}", tensor)
                    for field, tensor in tensors.items()
                    if tensor is not None
                ]
        tensors_by_name += sorted(of_width, key=lambda named: (-named[1].itemsize, named[0]))
    return tensors_by_name


def described(replicas: Mapping[Width, Parts]) -> dict[str, str]:
    """The metadata that the tensors do not contain: widths; and group sizes, or the shapes and
    rates of trellis codes."""
    texts = {"bits": ",".join(map(str, sorted(replicas)))}
    for bits, parts in replicas.items():
        for name, part in parts.items():
            if isinstance(part, Packed):
                texts[f"{name}.group_size"] = str(part.group_size)
            elif isinstance(part, Trellis):
                texts[f"{name}.outputs"] = str(part.num_outputs)
                texts[f"{name}.inputs"] = str(part.num_inputs)
                texts[f"{bits}.{name}.half_bits"] = str(part.half_bits)
                texts["state_bits"] = str(part.state_bits)
    return texts


def assembled(bits: Width, tensors: dict[str, torch.Tensor], metadata: Mapping[str, str]) -> Parts:
    """The matrices of a width, checked for what would make a reader fail. Raises ValueError that
    says what is wrong."""
    parts: Parts = {name: tensor for name, tensor in tensors.items() if "." not in name}
    for name in sorted({name.partition(".")[0] for name in tensors if "." in name}):
        fields = {
            field.partition(".")[2]: tensor
            for field, tensor in tensors.items()
            if field.startswith(f"{name}.")
        }
        coded = _trellis if "codes" in fields else _packed
        parts[name] = coded(bits, name, fields, metadata)
    return parts


def _packed(
    bits: Width, name: str, fields: dict[str, torch.Tensor], metadata: Mapping[str, str]
) -> Packed:
    scales = fields.get("scales")
    if scales is None or scales.dim() != 2:
        raise ValueError(f"{name} is not described")
    group_size = _number(metadata, f"{name}.group_size")
    num_groups, num_outputs = scales.shape
    num_inputs = num_groups * group_size
    _check(name, bits, fields, packed_shapes(num_outputs, num_inputs, bits, group_size))
    return Packed(bits, group_size, num_inputs, **{field: fields.get(field) for field in PARTS})


def _trellis(
    bits: Width, name: str, fields: dict[str, torch.Tensor], metadata: Mapping[str, str]
) -> Trellis:
    numbers = (f"{bits}.{name}.half_bits", "state_bits", f"{name}.outputs", f"{name}.inputs")
    half_bits, state_bits, num_outputs, num_inputs = (
        _number(metadata, number) for number in numbers
    )
    high = fields.get("high")
    if half_bits not in HALF_BITS or state_bits not in trellis.READABLE_STATE_BITS or high is None:
        raise ValueError(f"{name} is not described")
    tensors = {field: fields.get(field) for field in trellis.PARTS}
    part = Trellis(half_bits, state_bits, num_outputs, **tensors, num_inputs=num_inputs)
    if high.dtype != torch.uint8 or high.shape != (-(-num_inputs // 8),):
        raise ValueError(f"{name} has {list(high.shape)} bytes of high columns")
    num_high = int(part.is_high().sum())
    if num_high and half_bits == HALF_BITS[-1]:
        raise ValueError(f"{name} has columns of more than {half_bits} half bits")
    shapes = trellis_shapes(
        num_outputs, num_inputs, half_bits, num_high, is_rotated=part.is_rotated
    )
    _check(name, bits, fields, shapes)
    return part


def _number(metadata: Mapping[str, str], name: str) -> int:
    text = metadata.get(name, "")
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{name} is not described")
    return int(text)


def _check(
    name: str,
    bits: Width,
    fields: Mapping[str, torch.Tensor],
    expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> None:
    shapes = {field: (tensor.dtype, tuple(tensor.shape)) for field, tensor in fields.items()}
    if shapes != expected:
        raise ValueError(f"{name} at {bits} bits has tensors {shapes} where {expected} belong")
