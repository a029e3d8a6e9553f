"""Experts in RAM."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch

from artifacts.common.host_memory import num_cores
from runtime.links.page_lock import PageLock, check_budget
from runtime.model.layout import ExpertStore, aligned, fill, round_up

_MOST_READERS = 16  # threads; memory is busy with fewer


class RamStore(ExpertStore):
    """All experts that `disk` reads, copied once into one aligned buffer [L*E, nbytes] by a thread
    for each core that the process may use.

    `pin` page-locks the buffer for asynchronous copies to a GPU, a layer while later ones are read;
    `progress`, if given, is called with the number of experts copied so far. Raises OutOfResources
    when there is no room for the buffer, BadInput when the files change meanwhile.
    """

    def __init__(
        self, disk: ExpertStore, *, pin: bool = False, progress: Callable[[int], None] | None = None
    ) -> None:
        self.layout = disk.layout
        self.shape = disk.shape
        self.is_pinned = pin
        num_keys = self.shape.num_keys
        stride = round_up(self.layout.nbytes)
        if pin:
            check_budget(num_keys * stride)
        self.buffer = aligned(num_keys * stride).view(num_keys, stride)
        lock = PageLock(self.buffer, self) if pin else None
        with _readers() as readers:
            done = readers.map(partial(self._copy, disk), range(num_keys))
            for count, _ in enumerate(done, start=1):
                if lock is not None and count % self.shape.num_experts == 0:
                    lock.lock_to(count * stride)
                if progress is not None:
                    progress(count)
        disk.check_unchanged()
        self._experts = list(self.buffer[:, : self.layout.nbytes].unbind())

    def view(self, layer: int, expert: int) -> torch.Tensor:
        return self._experts[layer * self.shape.num_experts + expert]

    def check_unchanged(self) -> None:
        """Return always: the experts are copies of one checkpoint, whatever its files hold by
        now."""

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None:
        """Copy one expert to the start of `out`, uint8 [nbytes] or longer."""
        fill(out, self.view(layer, expert))

    def _copy(self, disk: ExpertStore, key: int) -> None:
        disk.read(*divmod(key, self.shape.num_experts), self.buffer[key])


@contextmanager
def _readers() -> Iterator[ThreadPoolExecutor]:
    """Lend threads in which torch computes alone: the threads of its own that it would give each of
    them spin between the checks of two experts. After an error nothing else is begun."""
    num_threads = torch.get_num_threads()
    readers = ThreadPoolExecutor(
        min(num_cores(), _MOST_READERS), initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        yield readers
    finally:
        readers.shutdown(cancel_futures=True)
        torch.set_num_threads(num_threads)
