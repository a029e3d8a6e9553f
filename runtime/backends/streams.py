"""Streams and graphs of a GPU: work beside the stream that computes, and work that is captured once
and queued again."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


def new_stream(device: torch.device) -> torch.Stream:
    """Return a stream beside the one that computes."""
    return torch.cuda.Stream(device)


class Branch:
    """A stream beside the one that computes. `is_open`: work was queued here for which compute does
    not wait yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._begun = torch.cuda.Event()
        self._done = torch.cuda.Event()
        self.is_open = False

    def fork(self) -> None:
        """Make this stream wait for the work that compute has so far."""
        self._begun.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._begun)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Queue on this stream."""
        self.is_open = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make compute wait for the work that was queued here so far."""
        if self.is_open:
            self._done.record(self._stream)
            torch.cuda.current_stream(self._device).wait_event(self._done)
            self.is_open = False


def new_pool() -> object:
    """Return a pool of memory for graphs that are never replayed at once."""
    return torch.cuda.graph_pool_handle()


class GraphSequence:
    """Graphs that are captured one after another, and replayed in the same order. They share one
    pool of memory: the tensors that a graph leaves there may be overwritten by a later graph, never
    by an earlier one. Those of another sequence in the pool may overwrite all but outputs that are
    still held when it is captured."""

    def __init__(self, pool: object) -> None:
        self._pool = pool
        self.graphs: list[torch.cuda.CUDAGraph] = []

    @contextmanager
    def capturing(self, stream: torch.Stream) -> Iterator[None]:
        """Capture the work that is queued within; between `end` and `begin` none is. Nothing is
        computed."""
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self.begin()
            try:
                yield
                self.end()
            except BaseException:
                self._abandon(stream.device)
                raise

    def begin(self) -> None:
        """Begin the next graph."""
        graph = torch.cuda.CUDAGraph()
        # the link's threads go on
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self.graphs.append(graph)

    def end(self) -> None:
        """End the graph that is being captured."""
        self.graphs[-1].capture_end()

    def _abandon(self, device: torch.device) -> None:
        """End a capture that failed. The driver may raise the error again; without this, torch's
        allocator would go on asking the graph which memory is its own, long after the graph is
        gone."""
        try:
            self.graphs[-1].capture_end()
        except RuntimeError:
            with suppress(RuntimeError):  # a later torch does it before it raises
                torch._C._cuda_endAllocateToPool(device.index, self._pool)
