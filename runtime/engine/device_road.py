"""The device road: a GPU finds a decoded token's experts, evicts as `lru` or `lfu`, brings what is missing and
computes, and the host waits for none of it, nor for the counters."""

import threading
from collections import deque

import numpy as np
import torch

from artifacts.shape import FULL_BITS
from runtime.control.on_device import CacheOnDevice
from runtime.engine.host_copy import NumberedLetters
from runtime.engine.output_gpu import GpuOutput
from runtime.kernels.gpu.addressing import WORD
from runtime.kernels.load import kernels
from runtime.model.open import MoeModel
from runtime.tiers.fast import ResidentExperts


class DeviceRoad:
    """Computes tokens whose layers the device decides, by the kernels of `runtime.kernels.gpu.decide`.

    The device has the cache from the first such token until `give_back`, which the host asks for where it decides
    itself again, as for a prompt. Meanwhile the controller's cache is out of date. The device sends its counters at the
    end of each pass. The host reads them at the end of a later pass, if they have come by then, or waits for them when
    counters are asked for.
    """

    def __init__(self, opened: MoeModel, books: CacheOnDevice, resident: ResidentExperts, output: GpuOutput) -> None:
        slots, self._books, self._output = resident.slots, books, output
        shape, self._device = opened.shape, resident.slots.device
        self._num_layers, self._num_experts = shape.num_layers, shape.num_experts
        self._host = resident.slow.stores[FULL_BITS].buffer.view(torch.int32)  # page-locked: the GPU reads it itself
        self._arena = slots.arena.view(torch.int32)
        with torch.inference_mode(False):  # a session forwards within it, and `generate` without
            in_words = [start // WORD for start in slots.starts]
            self._in_words = torch.tensor(in_words, dtype=torch.int64, device=self._device)
            self._slots, self._missing = (
                torch.zeros(1, shape.top_k, dtype=torch.int32, device=self._device) for _ in range(2)
            )
            ends = zip(books.first_slots, books.num_slots, strict=True)
            self._starts = [output.starts(range(first, first + count)) for first, count in ends]
        self._letters = NumberedLetters(self._device, 2 * shape.num_layers)
        self._sent: deque[tuple[int, np.ndarray]] = deque()  # numbers and tables of passes, the oldest first
        self._counting = threading.Lock()  # any thread may ask for counters
        books.counters.catch_up = self.catch_up
        self._cache = None  # a `DeviceCache`, whose addresses stay
        self._has_cache = self._is_in_token = self._is_queued = False
        self._counted = np.zeros((2, self._num_layers), np.int64)

    def forward(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """One layer of one token: hidden [1, H], ids and weights [1, K] as the router left them -> [1, H]."""
        if not self._is_in_token:
            self.begin_token()
        self._books.stepped(layer)
        return self.launch(layer, hidden, ids, weights)

    def begin_token(self) -> None:
        """See to it that the device has the cache, and knows the time of this token."""
        self._is_in_token = True
        if not self._has_cache:
            self._take_over()
        self._cache.clock.fill_(self._books.clock())

    def replayed(self) -> None:
        """Note that a graph has queued the steps of all layers, and the counters."""
        self._books.stepped(0, self._num_layers)
        self._is_queued = True

    def queue_counters(self) -> None:
        """Have the device send its counters, for the host to read when they are there."""
        self._letters.queue(self._cache.counts)

    def launch(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Queue the kernels of `forward`, which read and write at the same addresses each time."""
        decide, ids = kernels("gpu.decide"), ids.contiguous()
        decide.resolve(self._cache, layer, ids, self._slots, self._missing)
        decide.fill(
            self._host,
            self._in_words,
            self._arena,
            self._slots,
            self._missing,
            first_key=layer * self._num_experts,
            first_slot=self._books.first_slots[layer],
        )
        return self._output.forward_at(self._starts[layer], self._slots, hidden, ids, weights)

    def end_pass(self) -> None:
        """Have the device send the counters of this pass if it went this way, and count those that have come."""
        if self._is_in_token:
            if not self._is_queued:
                self.queue_counters()
            self._sent.append((self._letters.sent(), self._books.counters.table))
            self._is_in_token = self._is_queued = False
            self._count_sent(waits=False)

    def catch_up(self) -> None:
        """Count all tokens that have ended. Waits for the device where it has not computed the last one yet."""
        self._count_sent(waits=True)

    def _count_sent(self, *, waits: bool) -> None:
        with self._counting:
            while self._sent and (waits or self._is_full or self._letters.has_come(self._sent[0][0])):
                number, table = self._sent.popleft()
                counts = self._letters.read(number).reshape(2, -1).astype(np.int64)
                self._books.count(table, *(counts - self._counted))
                self._counted = counts

    @property
    def _is_full(self) -> bool:
        """Whether the next letter would overwrite one that was not read."""
        return len(self._sent) == self._letters.COUNT

    def give_back(self) -> None:
        """Give the cache to the controller if the device has it. Waits for the device."""
        if self._has_cache:
            self.catch_up()
            self._books.take_back(self._cache.owner.cpu().numpy(), self._cache.stamp.cpu().numpy())
            self.clear()

    def clear(self) -> None:
        """Forget the device's cache, and a token that did not end."""
        self._has_cache = self._is_in_token = self._is_queued = False

    def _take_over(self) -> None:
        self.catch_up()  # the next counts begin at 0
        self._letters.skip()  # a token that failed may have sent one
        tables = self._books.hand_over()
        with torch.inference_mode(False):
            sent = [torch.from_numpy(one).to(self._device) for one in (tables.table, tables.owner, tables.stamp)]
            if self._cache is None:
                own = {"counts_uses": self._books.counts_uses}
                self._cache = kernels("gpu.decide").DeviceCache.holding(*sent, self._books.num_slots, **own)
            else:
                self._cache.hold(*sent)
        self._has_cache = True
        self._counted = np.zeros((2, self._num_layers), np.int64)
