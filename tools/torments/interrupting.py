"""Events at any moment: an interruption between two instructions, a failing allocation."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch.overrides import TorchFunctionMode

from tools import ROOT

_WATCHED = str(ROOT / "runtime")


class Instructions:
    """Counts instructions of `runtime` on this thread; raises KeyboardInterrupt before number `at`,
    if given."""

    def __init__(self, at: int | None = None) -> None:
        self.count = 0
        self._at = at

    def __enter__(self) -> "Instructions":
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: object) -> object:
        if not frame.f_code.co_filename.startswith(_WATCHED):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> object:
        if event == "opcode":
            self.count += 1
            if self.count == self._at:
                raise KeyboardInterrupt
        return self._step


class OutOfMemory(TorchFunctionMode):
    """Counts torch's functions on this thread; number `at` raises OutOfMemoryError, if given."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.count = 0
        self._at = at

    def __torch_function__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        self.count += 1
        if self.count == self._at:
            raise torch.OutOfMemoryError("out of memory, as a test wants it")
        return function(*args, **(kwargs or {}))


@contextmanager
def allocations(at: int | None = None) -> Iterator[list[int]]:
    """Records the bytes of each `torch.empty` on any thread; call number `at` fails."""
    asked: list[int] = []
    real = torch.empty

    def empty(*size: object, **named: object) -> torch.Tensor:
        asked.append(1)
        if len(asked) == at:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory, as a test wants it")
        return real(*size, **named)

    torch.empty = empty
    try:
        yield asked
    finally:
        torch.empty = real
