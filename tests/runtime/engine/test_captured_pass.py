"""A capture that fails leaves nothing behind in torch's allocator."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from runtime.engine.captured_pass import CapturedPass

POOL = (0, 7)


class Broken:
    """In the place of a CUDA graph: its capture is invalid from the beginning."""

    def capture_begin(self, **_: object) -> None: ...

    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


def refuse() -> object:
    raise ValueError("the host waits here")


@pytest.mark.parametrize(
    ("forward", "told"),
    [(refuse, "the host waits here"), (lambda: None, "previous error")],
    ids=["forward", "end"],
)
def test_the_allocator_is_told_that_it_ended(
    forward: object, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []
    stream = SimpleNamespace(device=torch.device("cuda", 3), wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Broken)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *given: ended.append(given))
    captured = CapturedPass(None, None, POOL)
    with pytest.raises((ValueError, RuntimeError), match=told):
        captured.capture(forward, stream, lambda: None)
    assert ended == [(3, POOL)]
