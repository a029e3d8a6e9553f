"""Layout of an expert's tensors in a slot, and buffers that hold slots."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Protocol

import torch

from artifacts.errors import BadUsage, OutOfResources
from artifacts.formats.base import NOT_FINITE, Format
from artifacts.shape import Shape
from runtime.model.arithmetic import project
from runtime.model.files.direct_io import PAGE
from runtime.model.huge_pages import HUGE_PAGE, anonymous

# bytes; CPU kernels round differently at other alignments, and results stop being bit-identical
ALIGNMENT = 64
Spans = tuple[tuple[int, int], ...]  # of a slot: bytes from start to stop


class Layout(Protocol):
    """Layout of an expert of one precision in a slot."""

    is_plain: bool  # whether each part is one tensor of the module's own numbers
    codes: str  # how its numbers lie: plain, neurons, published, mixed (of these), packed, trellis
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


PLAIN = ""  # the role of the only tensor of a parameter that is not quantised


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


def laid_out(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return the parts one after another in a slot, each 64-byte aligned."""
    placed = []
    offset = 0
    for part in parts:
        placed.append(replace(part, offset=offset))
        offset = round_up(placed[-1].stop)
    return tuple(placed)


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The parts of one expert at full precision in a slot: each 64-byte aligned, all of one
    dtype."""

    is_plain: ClassVar[bool] = True
    codes: ClassVar[str] = "plain"
    project: ClassVar[Callable[..., torch.Tensor]] = staticmethod(project)

    parts: tuple[Part, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> "ExpertLayout":
        """Lay out parameters of the given shapes (one expert's, without the expert dimension) in
        their order."""
        return cls(laid_out(Part(name, dtype, shape) for name, shape in shapes.items()), dtype)

    @property
    def format(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        """Bytes of a slot, a multiple of 64."""
        return round_up(self.parts[-1].stop)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts by name as views of `buffer`, uint8 [nbytes] or longer, on any device;
        nothing is copied."""
        return {part.name: part.view(buffer) for part in self.parts}

    def digest(self, buffer: torch.Tensor) -> str:
        """Return the sha256 of an expert in `buffer`, uint8 [nbytes] or longer on the CPU, without
        the bytes between its parts: the same wherever the checkpoint keeps the expert."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(memoryview(self._stored(part, buffer).numpy()))
        return digest.hexdigest()

    def _stored(self, part: Part, buffer: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a part as the checkpoint has them."""
        return part.bytes_of(buffer)

    def weights(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts as the module has them: here the views."""
        return self.views(buffer)

    def fault(self, buffer: torch.Tensor, spans: Spans) -> str | None:
        """Return the fault of a part within these spans of `buffer`, with its name; None if all
        numbers are finite."""
        for part in self.parts:
            for start, stop in _overlaps(spans, part.offset, part.stop):
                if not is_finite(buffer[start:stop].view(self.dtype)):
                    return f"{part.name} holds {NOT_FINITE}"
        return None

    def several(self, part: Part, memory: torch.Tensor) -> torch.Tensor:
        """View one part of several experts that are adjacent in `memory`, uint8, as [n, *shape];
        nothing is copied."""
        return memory.view(self.dtype).view(-1, *part.shape)


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


def _overlaps(spans: Spans, first: int, last: int) -> Iterator[tuple[int, int]]:
    for start, stop in spans:
        if max(start, first) < min(stop, last):
            yield max(start, first), min(stop, last)


def round_up(nbytes: int) -> int:
    """Round up to a multiple of 64 bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
