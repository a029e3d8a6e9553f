"""The formats by the layouts that a config names, and the roles of their tensors by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from artifacts.formats.base import Format
from artifacts.formats.fp8 import Scaled
from artifacts.formats.integers.awq import Awq
from artifacts.formats.integers.gptq import Gptq
from artifacts.formats.integers.packed_integers import PackedIntegers
from artifacts.formats.mxfp4 import MxFp4
from artifacts.formats.nvfp4 import NvFp4
from artifacts.formats.schemes import BLOCK, Scheme
from artifacts.formats.stated import Stated, stated_quantisation

Roles = Mapping[str, str]
"""The ending of a tensor's name after the name of the matrix, by role."""

ZEROS = "qzeros"
_GPTQ = {"qweight": ".qweight", ZEROS: ".qzeros", "scales": ".scales", "g_idx": ".g_idx"}
_PACKED = {
    "packed": "_packed",
    "scale": "_scale",
    "zero_point": "_zero_point",
    "g_idx": "_g_idx",
    "size": "_shape",
}
_OPTIONAL = frozenset(("g_idx", "zero_point", "size"))


@dataclass(frozen=True, slots=True)
class Spelling:
    """A format with the names of its tensors. Each begins with the parameter's name, or, if
    `is_module`, with the name of the module whose `weight` the parameter is. `symmetric` is a
    format whose zero-points are all one number: files may lack the zero-points, or have those of
    another version."""

    format: Format
    roles: Roles
    is_module: bool = False
    symmetric: Gptq | None = None

    @property
    def anchor(self) -> str:
        """The ending of the tensor by which a matrix is found."""
        return next(iter(self.roles.values()))

    @property
    def required(self) -> frozenset[str]:
        return frozenset(self.roles) - _OPTIONAL - ({ZEROS} if self.symmetric else set())


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Quantisation as a config states it, the spellings that may occur, and the anchors that
    several schemes share."""

    stated: Stated
    spellings: tuple[Spelling, ...]
    ambiguous: frozenset[str]

    @property
    def method(self) -> str:
        return self.stated.method

    def is_spelled(self, module: str, spelling: Spelling) -> bool:
        """Return whether tensors of a module that have the names of this spelling are of its
        format. Where several formats share the names, the config says which it is."""
        if spelling.anchor not in self.ambiguous:
            return True
        scheme = self.stated.scheme_of(module)
        return scheme is not None and spelling in spellings_of(scheme)


def quantisation_of(config: Mapping, folder: Path | None = None) -> Quantisation | None:
    """Read the quantisation as `stated_quantisation` does, and add the spellings of its schemes."""
    stated = stated_quantisation(config, folder)
    if stated is None:
        return None
    by_scheme: list[tuple[Spelling, ...]] = []
    for scheme in stated.schemes:
        if spellings_of(scheme) not in by_scheme:
            by_scheme.append(spellings_of(scheme))
    anchors = [
        anchor for spellings in by_scheme for anchor in {spelling.anchor for spelling in spellings}
    ]
    ambiguous = frozenset(anchor for anchor in anchors if anchors.count(anchor) > 1)
    return Quantisation(stated, tuple(chain(*by_scheme)), ambiguous)


def spellings_of(scheme: Scheme) -> tuple[Spelling, ...]:
    """The names that tensors of a scheme may have; the usual ones first."""
    return _LAYOUTS[scheme.layout](scheme)


def _scaled(*suffixes: str) -> Callable[[Scheme], tuple[Spelling, ...]]:
    def of(scheme: Scheme) -> tuple[Spelling, ...]:
        # Scales of a row or a matrix are told by their shape, whatever the config says.
        block = scheme.block if min(scheme.block) > 1 else (BLOCK, BLOCK)
        return tuple(
            Spelling(Scaled(block=block), {"weight": "", "scale": suffix}) for suffix in suffixes
        )

    return of


def _gptq(scheme: Scheme) -> tuple[Spelling, ...]:
    form = Gptq(
        bits=scheme.bits,
        zero_offset=int(scheme.layout == "gptq"),
        is_permuted=scheme.is_ordered,
        group_size=scheme.block[1],
        is_symmetric=scheme.is_symmetric,
    )
    return (Spelling(form, _GPTQ, is_module=True, symmetric=form if scheme.is_symmetric else None),)


def _awq(scheme: Scheme) -> tuple[Spelling, ...]:
    roles = {role: _GPTQ[role] for role in ("qweight", ZEROS, "scales")}
    return (
        Spelling(
            Awq(group_size=scheme.block[1], is_symmetric=scheme.is_symmetric), roles, is_module=True
        ),
    )


def _packed(scheme: Scheme) -> tuple[Spelling, ...]:
    form = PackedIntegers(
        bits=scheme.bits,
        group_size=scheme.block[1],
        has_zeros=scheme.has_zeros,
        is_permuted=scheme.is_ordered,
        is_symmetric=scheme.is_symmetric,
    )
    return (Spelling(form, _PACKED),)


def _mxfp4(blocks: str, scales: str) -> Callable[[Scheme], tuple[Spelling, ...]]:
    return lambda scheme: (Spelling(MxFp4(), {"blocks": blocks, "scales": scales}),)


def _nvfp4(
    packed: str, matrix: str, *, is_inverse: bool
) -> Callable[[Scheme], tuple[Spelling, ...]]:
    roles = {"packed": packed, "scale": "_scale", "global": matrix}
    return lambda scheme: (Spelling(NvFp4(is_inverse=is_inverse), roles),)


_LAYOUTS: dict[str, Callable[[Scheme], tuple[Spelling, ...]]] = {
    "fp8": _scaled("_scale_inv", "_scale"),
    "float-quantized": _scaled("_scale"),
    "fp8_pb_wo": _scaled("_scale", "_scale_inv"),
    "mxfp4": _mxfp4("_blocks", "_scales"),
    "mxfp4-pack-quantized": _mxfp4("_packed", "_scale"),
    "gptq": _gptq,
    "gptq_v2": _gptq,
    "awq": _awq,
    "pack-quantized": _packed,
    "nvfp4": _nvfp4("", "_scale_2", is_inverse=False),
    "nvfp4-pack-quantized": _nvfp4("_packed", "_global_scale", is_inverse=True),
}
