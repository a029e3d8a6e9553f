"""A stand-in for CUDA graphs: a capture records torch's operations and the launches of triton's
interpreter, and a replay does them again with the same tensors, at the same addresses.

As on a GPU a capture computes nothing that lasts: what it has overwritten is put back at its end,
and what it has made becomes NaN until the first replay. It refuses what CUDA refuses: whatever
reads the device's memory on the host or copies from the host's, and page-locked memory. Import it
under the interpreter only.

A graph whose kernels wait for the host is replayed on a thread of its own. Kernels that are
launched behind it, and copies of what it has made, wait for its end.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils
from triton.runtime.interpreter import GridExecutor

from runtime import devices
from runtime.backends import host_copy
from runtime.kernels.gpu import mailbox
from tools.gpu.faked import counted_gpu

counts: Counter[str] = Counter()
_running: list[threading.Thread] = []  # the graph that is replayed on a thread, if any
_PATIENCE_S = 60.0
_READ_BY_HOST = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero", "lift_fresh",
    "repeat_interleave.Tensor", "bincount",
}  # fmt: skip
_ON_HOST = ("cpu", "numpy", "tolist", "item")


class Unsupported(RuntimeError):
    """What CUDA says of a stream that is capturing."""


class Graph:
    """In the place of `torch.cuda.CUDAGraph`."""

    under_way: "Graph | None" = None

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: dict[int, torch.Tensor] = {}
        self._waits = False

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        assert Graph.under_way is None and not self._work, (
            "a capture within a capture, or a second one"
        )
        Graph.under_way = self
        self._mode = _Recording(self)
        self._mode.__enter__()

    def capture_end(self) -> None:
        if Graph.under_way is not self:
            raise Unsupported("this graph is not being captured")
        self._mode.__exit__(None, None, None)
        Graph.under_way = None
        for own, before in self._saved.values():
            own.copy_(before)
        for made in self._made.values():
            if made.is_floating_point():
                made.fill_(torch.nan)

    def replay(self) -> None:
        counts["graphs"] += 1
        join()
        if not self._waits:
            self._replay()
            return
        _running.append(threading.Thread(target=self._replay, daemon=True))
        _running[0].start()

    def _replay(self) -> None:
        with torch.no_grad():
            for work in self._work:
                work()

    def take(self, func, args: tuple, kwargs: dict) -> object:
        """Record an operation of torch, and do it for the shapes of what it makes."""
        written = [one for one in _written(func, args, kwargs) if _place(one) not in self._made]
        for one in written:
            if _place(one) not in self._saved:
                whole = torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage())
                self._saved[_place(one)] = whole, whole.clone()
        known = {
            _place(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)
        }
        result = func(*args, **kwargs)
        new = [
            one
            for one in tree_leaves(result)
            if isinstance(one, torch.Tensor) and _place(one) not in known
        ]
        self._made.update({_place(one): one for one in new})
        if new or func._schema.is_mutable:
            counts["captured kernels"] += "empty" not in func._schema.name  # memory alone is none
            self._work.append(lambda: _again(func, args, kwargs, result))
        return result

    def launch(self, kernel: GridExecutor, work: Callable[[], object]) -> None:
        """Record a kernel's launch."""
        counts["captured kernels"] += 1
        self._waits |= kernel.fn.__name__ == mailbox._receive.fn.__name__
        self._work.append(work)


class _Recording(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        by_mask = name == "index" and any(
            one is not None and one.dtype == torch.bool for one in args[1]
        )
        if by_mask or name in _READ_BY_HOST or f"{name}.{func._overloadname}" in _READ_BY_HOST:
            raise Unsupported(f"operation not permitted when stream is capturing: {name}")
        return self._graph.take(func, args, kwargs or {})


def _written(func, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The arguments that an operation writes to."""
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    names = [
        one.name
        for one in func._schema.arguments
        if one.alias_info is not None and one.alias_info.is_write
    ]
    return [
        one
        for one in tree_leaves([given.get(name) for name in names])
        if isinstance(one, torch.Tensor)
    ]


def _again(func, args: tuple, kwargs: dict, before: object) -> None:
    """Do an operation again, and put what it makes where it was the first time."""
    for own, new in zip(tree_leaves(before), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(own, torch.Tensor) and own.data_ptr() != new.data_ptr():
            own.copy_(new)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def install(patch: pytest.MonkeyPatch) -> None:
    """Let sessions capture graphs in this process; `counted_gpu` has the streams."""
    patch.setattr(devices, "has_graphs", lambda device: True)
    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    # which transformers asks before it reads on the host how many tokens came before
    patch.setattr(masking_utils, "is_tracing", lambda tensor=None: Graph.under_way is not None)
    launch = GridExecutor.__call__

    def launched(kernel: GridExecutor, *args: object, **kwargs: object) -> None:
        if Graph.under_way:
            Graph.under_way.launch(kernel, lambda: launch(kernel, *args, **kwargs))
        else:
            counts["launches"] += 1
            join()
            launch(kernel, *args, **kwargs)

    patch.setattr(GridExecutor, "__call__", launched)
    patch.setattr(
        counted_gpu.Stream, "query", lambda stream: not any(one.is_alive() for one in _running)
    )
    # what the interpreter cannot do
    patch.setattr(mailbox, "globaltimer", lambda: tl.full((), clock_ns(), tl.int64))
    patch.setattr(mailbox, "_acquired", _read)
    clone = torch.Tensor.clone

    def cloned(*args: object, **named: object) -> torch.Tensor:
        if threading.current_thread() not in _running:
            join()
        return clone(*args, **named)

    patch.setattr(torch.Tensor, "clone", cloned)
    for name in _ON_HOST:
        patch.setattr(torch.Tensor, name, _refused(getattr(torch.Tensor, name)))
    patch.setattr(host_copy, "page_locked", _refused(host_copy.page_locked))


def join() -> None:
    """Wait for the graph that is replayed on a thread, if there is one."""
    if _running:
        _running[0].join(_PATIENCE_S)
        assert not _running[0].is_alive(), "the graph waits for something that the host does not do"
        _running.clear()


def clock_ns() -> int:
    """The device's clock; the thread of a kernel that waits lets the host's go on."""
    time.sleep(0)
    return time.perf_counter_ns()


def _read(number_ptr) -> tl.tensor:
    return tl.load(number_ptr)


def _refused(work: Callable) -> Callable:
    def refuse(*args: object, **kwargs: object) -> object:
        if Graph.under_way:
            raise Unsupported(f"operation not permitted when stream is capturing: {work.__name__}")
        return work(*args, **kwargs)

    return refuse
