"""Times of kernels leave out what Python needs to launch them; what machines for GPUs have in other
versions."""

import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.triton_process import why_not
from tools.gpu.packages import has_numba
from tools.gpu.timing import gbps, microseconds


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpus_time_is_that_of_replayed_graphs(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Each call takes 5 us of the device, and its launch a millisecond of the host."""
    clock = SimpleNamespace(us=0.0)

    class Graph:
        def replay(self) -> None:
            clock.us += 3 * 5.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.us = clock.us

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: "Event") -> float:
            return (other.us - self.us) / 1e3

    @contextmanager
    def entered(*_: object):
        yield

    for name, one in {
        "CUDAGraph": Graph,
        "Event": Event,
        "graph": entered,
        "device": entered,
    }.items():
        monkeypatch.setattr(torch.cuda, name, one)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None)
    )
    us = microseconds(lambda turn: time.sleep(1e-3), 3, 8, device)
    assert us == pytest.approx(5.0) if device == "cuda" else us >= 1e3
    assert gbps(1e6, 10.0) == pytest.approx(100.0)


def test_a_numba_that_fails_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_numba.__wrapped__()
    monkeypatch.setitem(sys.modules, "numba", None)
    assert not has_numba.__wrapped__()


def test_an_interpreter_that_would_fail_is_not_asked() -> None:
    assert "numpy 2.4.1" in why_not("3.6.0", "2.4.1") and "not installed" in why_not(None, "2.4.1")
    assert not why_not("3.7.1", "2.4.6") and not why_not("3.6.0", "2.3.5")
