"""Layout of slots for experts that a checkpoint stores in different ways: some layers in more bits,
as GGUF files have them, or not quantised."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from runtime.model.layout import ALIGNMENT, Spans
from runtime.model.quantised.quantised_layout import QuantisedLayout
from runtime.model.quantised.quantised_matrix import Parts, project_quantised


@dataclass(frozen=True, slots=True)
class MixedLayout:
    """Layout of a slot with room for the largest expert, after one byte with the number of the
    layout of the expert in it."""

    is_plain: ClassVar[bool] = False
    codes: ClassVar[str] = "mixed"
    project: ClassVar[Callable[..., torch.Tensor]] = staticmethod(project_quantised)
    start: ClassVar[int] = ALIGNMENT  # of the expert in its slot

    layouts: tuple[QuantisedLayout, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.layouts[0].dtype

    @property
    def format(self) -> str:
        """Names of the formats."""
        parts = (part for layout in self.layouts for part in layout.parts)
        return " and ".join(dict.fromkeys(part.format.name for part in parts if part.format))

    @property
    def nbytes(self) -> int:
        """Bytes of a slot, a multiple of 64."""
        return self.start + max(layout.nbytes for layout in self.layouts)

    def views(self, buffer: torch.Tensor) -> Mapping[str, object]:
        """Return views of the expert that is in `buffer`, uint8 [nbytes] or longer; the layout is
        looked up when they are used. On a GPU each use waits for the byte."""
        return _Views(buffer, [layout.views(buffer[self.start :]) for layout in self.layouts])

    def weights(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the numbers of each part, as the module has them."""
        return self._of(buffer).weights(buffer[self.start :])

    def digest(self, buffer: torch.Tensor) -> str:
        """Return the sha256 of an expert in `buffer`, the same wherever the checkpoint keeps it."""
        return self._of(buffer).digest(buffer[self.start :])

    def arrange(self, buffer: torch.Tensor) -> str | None:
        """Put codes into the order of their groups. Return the fault of a part whose index leads
        beyond its groups, or None."""
        return self._of(buffer).arrange(buffer[self.start :])

    def fault(self, buffer: torch.Tensor, spans: Spans) -> str | None:
        """Return the fault of a part, with its name; None if all are sound."""
        return self._of(buffer).fault(buffer[self.start :], spans)

    def _of(self, buffer: torch.Tensor) -> QuantisedLayout:
        return self.layouts[int(buffer[0])]


class _Views(Mapping):
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
