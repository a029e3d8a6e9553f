"""Times of kernels by the device's own clock: calls are captured in a CUDA graph and replayed, so
that what Python needs to launch them does not count."""

import time
from collections.abc import Callable
from itertools import cycle, islice

import torch


def microseconds(work: Callable[[int], object], turns: int, calls: int, device: str) -> float:
    """Microseconds of one call of `work`, which gets the number of its turn and does not wait for
    the device. On a CPU by the host's clock."""
    for turn in range(turns):
        work(turn)  # compiles, and makes room
    return (
        host_microseconds(work, turns, calls, device)
        if device == "cpu"
        else _replayed(work, turns, calls, device)
    )


def host_microseconds(work: Callable[[int], object], turns: int, calls: int, device: str) -> float:
    """Microseconds of one call by the host's clock, including launches and waits."""
    work(0)
    finish(device)
    begin_s = time.perf_counter()
    for turn in islice(cycle(range(turns)), calls):
        work(turn)
    finish(device)
    return (time.perf_counter() - begin_s) / calls * 1e6


def _replayed(work: Callable[[int], object], turns: int, calls: int, device: str) -> float:
    with torch.cuda.device(device):
        finish(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for turn in range(turns):
                work(turn)
        return device_microseconds(graph.replay, -(-calls // turns), device) / turns


def device_microseconds(work: Callable[[], object], calls: int, device: str) -> float:
    """Microseconds of one call of `work`, which queues on the current stream, from its first
    operation on the device to its last. On a CPU by the host's clock."""
    if device == "cpu":
        return host_microseconds(lambda turn: work(), 1, calls, device)
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()  # the first replay of a graph also uploads it
    begun.record()
    for _ in range(calls):
        work()
    done.record()
    done.synchronize()
    return begun.elapsed_time(done) * 1e3 / calls


def gbps(nbytes: float, us: float) -> float:
    """Gigabytes per second."""
    return nbytes / us / 1e3


def finish(device: str) -> None:
    """Synchronise the current stream; no effect on a CPU."""
    if device != "cpu":
        torch.cuda.current_stream(device).synchronize()
