"""Layout of an expert's tensors in a slot, and buffers that hold slots."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar, Protocol

import torch

from artifacts.errors import BadUsage, OutOfResources
from artifacts.formats.base import BEYOND, NOT_FINITE, Format, Stored
from artifacts.formats.integers.awq import as_stored, in_slot, is_turned, turn
from artifacts.formats.integers.order import ARRANGED, ORDER, arrange, index_of
from artifacts.shape import Shape
from runtime.model.files.direct_io import PAGE
from runtime.model.huge_pages import HUGE_PAGE, anonymous
from runtime.model.quantised.quantised_matrix import (
    PLAIN,
    Parts,
    QuantisedMatrix,
    joined,
    project_quantised,
)

# bytes; CPU kernels round differently at other alignments, and results stop being bit-identical
ALIGNMENT = 64
Spans = tuple[tuple[int, int], ...]  # of a slot: bytes from start to stop


class Layout(Protocol):
    """Layout of an expert of one precision in a slot."""

    is_plain: bool  # whether each part is one tensor of the module's own numbers
    codes: str  # how its numbers lie: plain, neurons, published, mixed (of both), packed, trellis
    format: str  # the name of how its matrices are stored
    dtype: torch.dtype  # of most of its parts
    project: Callable[
        ..., torch.Tensor
    ]  # the product that `expert_forward` computes with its views

    @property
    def nbytes(self) -> int: ...

    def views(self, buffer: torch.Tensor) -> Mapping[str, object]: ...


class ExpertStore(Protocol):
    """Reads experts of one precision, one at a time. `buffer` has all of them where they are in
    RAM."""

    layout: Layout
    shape: Shape
    buffer: torch.Tensor | None = None

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None: ...

    def read_kept(self, layer: int, expert: int, out: torch.Tensor) -> bool:
        """Fill `out` with a whole expert from the operating system's page cache, without waiting
        for the device.

        Return False, with `out` undefined, where the cache lacks a part of it, and where a store
        cannot read from the cache alone.
        """
        return False

    def view(self, layer: int, expert: int) -> torch.Tensor | None:
        """Return one expert's bytes where they lie in RAM, uint8 [nbytes]; None where it is on
        disk."""
        return None

    def direct(self) -> "ExpertStore":
        """Return a store of the same experts that reads past the page cache. Raises BadUsage for
        replicas, BadInput where the file system cannot do that."""
        raise BadUsage(
            "--link direct reads a checkpoint past the page cache, and replicas come through it: "
            "use disk"
        )

    def check_unchanged(self) -> None:
        """Raise BadInput if files whose experts were read have been written into since they were
        opened."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of an expert: the parameter called `name`, in its module's own orientation, or one
    tensor of it by its `role` in the `format` of a matrix.

    `offset` is in bytes from the start of the slot. `source` counts the matrices that make up the
    rows of one parameter. `format` is None for numbers as they are, and in replicas.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0
    role: str = PLAIN
    source: int = 0
    format: Format | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """The byte behind its last one."""
        return self.offset + self.nbytes

    def bytes_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """View the bytes of this tensor in `buffer`, uint8, on any device."""
        return buffer[self.offset : self.stop]

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """View this tensor in `buffer`, uint8, on any device; nothing is copied."""
        return self.bytes_of(buffer).view(self.dtype).view(self.shape)


PlacedParts = dict[str, Part]
"""The tensors of one matrix by role."""


def stored_part(name: str, source: int, role: str, form: Format, stored: Stored) -> Part:
    """Return the part of an expert that a tensor of a checkpoint becomes."""
    role, form, shape = in_slot(role, form, stored.shape)
    return Part(name, stored.dtype, shape, role=role, source=source, format=form)


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The parts of one expert in a slot, each 64-byte aligned: numbers as the module has them, and
    tensors of matrices in few bits.

    `dtype` is the module's; `is_transposed` says whether its matrices are [in, out]. Where a
    checkpoint stores experts in different ways, as GGUF files have some layers in more bits,
    `variants` has a layout for each, and `parts` is empty. The slot has room for the largest; it
    begins with the number of the variant in it, one byte.
    """

    project: ClassVar[Callable[..., torch.Tensor]] = staticmethod(project_quantised)

    parts: tuple[Part, ...]
    dtype: torch.dtype
    is_transposed: bool = False
    variants: tuple["ExpertLayout", ...] = ()
    matrices: dict[str, list[PlacedParts]] = field(init=False, compare=False, repr=False)
    """The matrices that make up the rows of each parameter, by its name."""
    _ordered: list[tuple[str, PlacedParts]] = field(init=False, compare=False, repr=False)
    """The matrices whose codes are put into another order when they are read."""

    def __post_init__(self) -> None:
        found: dict[str, dict[int, PlacedParts]] = {}
        for part in self.parts:
            found.setdefault(part.name, {}).setdefault(part.source, {})[part.role] = part
        matrices = {name: list(by_source.values()) for name, by_source in found.items()}
        ordered = [
            (name, placed)
            for name, stored in matrices.items()
            for placed in filter(_is_ordered, stored)
        ]
        object.__setattr__(self, "matrices", matrices)
        object.__setattr__(self, "_ordered", ordered)

    @classmethod
    def of(cls, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> "ExpertLayout":
        """Lay out parameters of the given shapes (one expert's, without the expert dimension) in
        their order."""
        return cls.stored((Part(name, dtype, shape) for name, shape in shapes.items()), dtype)

    @classmethod
    def stored(
        cls,
        parts: Iterable[Part],
        dtype: torch.dtype,
        *,
        is_transposed: bool = False,
        start: int = 0,
    ) -> "ExpertLayout":
        """Lay out the parts one after another in a slot, from byte `start` on."""
        placed = []
        for part in parts:
            placed.append(replace(part, offset=start))
            start = round_up(placed[-1].stop)
        return cls(tuple(placed), dtype, is_transposed)

    @property
    def is_plain(self) -> bool:
        """Whether each part is one tensor of the module's own numbers."""
        return not self.variants and all(part.format is None for part in self.parts)

    @property
    def codes(self) -> str:
        return "mixed" if self.variants else "plain" if self.is_plain else "published"

    @property
    def format(self) -> str:
        """Names of the formats of its matrices, as `mxfp4`, or of the dtype."""
        names = dict.fromkeys(part.format.name for part in self._stored if part.format)
        return " and ".join(names) or str(self.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        """Bytes of a slot, a multiple of 64."""
        return round_up(max(part.stop for part in self._stored))

    @property
    def _stored(self) -> list[Part]:
        return [part for layout in self.variants or (self,) for part in layout.parts]

    def views(self, buffer: torch.Tensor) -> Mapping[str, object]:
        """Return views of `buffer`, uint8 [nbytes] or longer, on any device, nothing is copied: for
        each part its numbers, or the matrices in few bits that make up its rows.

        Of several variants one is looked up when its views are used; on a GPU each use waits for
        the slot's first byte.
        """
        if self.variants:
            return _Variants(buffer, [each.views(buffer) for each in self.variants])
        return {
            part: _plain([_views(buffer, placed) for placed in stored])
            for part, stored in self.matrices.items()
        }

    def weights(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the numbers of each part, as the module has them; copies, except for parts that
        are not quantised."""
        layout = self._of(buffer)
        return {
            name: part
            if isinstance(part, torch.Tensor)
            else joined(part, layout.dtype, is_transposed=layout.is_transposed)
            for name, part in layout.views(buffer).items()
        }

    def digest(self, buffer: torch.Tensor) -> str:
        """Return the sha256 of an expert in `buffer`, uint8 [nbytes] or longer on the CPU, without
        the bytes between its parts: the same wherever the checkpoint keeps the expert."""
        digest = hashlib.sha256()
        for part in self._of(buffer).parts:
            digest.update(memoryview(_as_stored(part, buffer).numpy()))
        return digest.hexdigest()

    def arrange(self, buffer: torch.Tensor) -> str | None:
        """Put the codes of an expert into the order of their groups, and AWQ's into GPTQ's; its
        stored bytes lie in `buffer`, uint8 [nbytes] or longer on the CPU. Return the fault of a
        part whose index leads beyond its groups; None if none does."""
        for name, placed in self._of(buffer)._ordered:
            taken = {role: part for role, part in placed.items() if role in ARRANGED}
            matrix = _views(buffer, taken)
            if is_turned(matrix.format):
                turn(matrix.tensors)
            elif not arrange(matrix.tensors, matrix.format.lacking):
                return f"{name} holds {BEYOND}"
        return None

    def fault(self, buffer: torch.Tensor, spans: Spans) -> str | None:
        """Return the fault of a part, with its name; None if all are sound. Of numbers that are not
        quantised only those within these spans of `buffer` are read."""
        for name, stored in self._of(buffer).matrices.items():
            for placed in stored:
                if fault := _fault(buffer, placed, spans):
                    return f"{name} holds {fault}"
        return None

    def several(self, part: Part, memory: torch.Tensor) -> torch.Tensor:
        """View one part of several experts that are adjacent in `memory`, uint8, as [n, *shape];
        nothing is copied."""
        return memory.view(self.dtype).view(-1, *part.shape)

    def _of(self, buffer: torch.Tensor) -> "ExpertLayout":
        """Return the layout of the expert that is in `buffer`."""
        return self.variants[int(buffer[0])] if self.variants else self


class _Variants(Mapping):
    """Views of a slot by each layout; the slot's first byte chooses one."""

    def __init__(self, buffer: torch.Tensor, views: Sequence[Parts]) -> None:
        self._buffer = buffer
        self._views = views

    def __getitem__(self, name: str) -> object:
        return self._views[int(self._buffer[0])][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views[0])

    def __len__(self) -> int:
        return len(self._views[0])


def _views(buffer: torch.Tensor, placed: PlacedParts) -> QuantisedMatrix:
    tensors = {role: part.view(buffer) for role, part in placed.items()}
    return QuantisedMatrix(_format(placed), tensors)


def _format(placed: PlacedParts) -> Format | None:
    return next(iter(placed.values())).format


def _plain(matrices: list[QuantisedMatrix]) -> list[QuantisedMatrix] | torch.Tensor:
    is_one = len(matrices) == 1 and matrices[0].format is None
    return matrices[0].tensors[PLAIN] if is_one else matrices


def _as_stored(part: Part, buffer: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a part as the checkpoint has them where groups follow each other."""
    if part.role == ORDER:
        return index_of(part.bytes_of(buffer).view(part.dtype)).view(torch.uint8)
    if part.format and is_turned(part.format):
        return as_stored(part.role, part.view(buffer)).flatten().view(torch.uint8)
    return part.bytes_of(buffer)


def _is_ordered(placed: PlacedParts) -> bool:
    """Return whether the codes of a matrix are put into another order when they are read."""
    form = _format(placed)
    return ORDER in placed or (form is not None and is_turned(form))


def _fault(buffer: torch.Tensor, placed: PlacedParts, spans: Spans) -> str | None:
    if _format(placed):
        return _views(buffer, placed).fault()
    part = placed[PLAIN]
    overlaps = (
        (max(start, part.offset), min(stop, part.stop))
        for start, stop in spans
        if max(start, part.offset) < min(stop, part.stop)
    )
    are_finite = all(is_finite(buffer[start:stop].view(part.dtype)) for start, stop in overlaps)
    return None if are_finite else NOT_FINITE


def aligned(nbytes: int, *, pin: bool = False) -> torch.Tensor:
    """Allocate a uint8 CPU tensor [nbytes]. It is page-aligned, so that a device can write to it
    past the page cache, and from 2 MiB on in huge pages; with `pin` it is page-locked and 64-byte
    aligned. Raises OutOfResources."""
    try:
        if nbytes >= HUGE_PAGE and not pin:
            return anonymous(nbytes)
        buffer = torch.empty(
            nbytes + (0 if pin else PAGE - ALIGNMENT), dtype=torch.uint8, pin_memory=pin
        )
    except (RuntimeError, OSError) as error:
        kind = "page-locked memory" if pin else "memory"
        raise OutOfResources(
            f"no room for {nbytes / 2**30:.2f} GiB of {kind}: leave the experts on disk"
        ) from error
    assert buffer.data_ptr() % ALIGNMENT == 0, (
        f"torch allocated at {buffer.data_ptr()}, not on a 64-byte border"
    )
    first = 0 if pin else -buffer.data_ptr() % PAGE
    return buffer[first : first + nbytes]


def fill(out: torch.Tensor, content: torch.Tensor) -> None:
    """Copy `content`, uint8, to the start of `out`. Where sizes are equal no slice is made, which
    would cost as much as copying a small expert."""
    (out if out.numel() == content.numel() else out[: content.numel()]).copy_(content)


def is_finite(values: torch.Tensor) -> bool:
    """Return whether a floating-point tensor holds neither NaN nor infinity."""
    # The extremes show both; isfinite of every element would take 20 times as long and a mask in
    # memory.
    return values.numel() == 0 or all(bool(extreme.isfinite()) for extreme in torch.aminmax(values))


def round_up(nbytes: int) -> int:
    """Round up to a multiple of 64 bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
