"""The device road: a GPU finds the experts of a decoded token, and of drafts behind it, evicts and
prefetches as the policies do, loads missing experts and computes. The host waits for none of it,
nor for the counters."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple

import numpy as np
import torch

from artifacts.shape import FULL_BITS
from runtime.backends import host_copy
from runtime.backends.streams import Branch
from runtime.backends.triton.triton_backend import TritonBackend
from runtime.control.on_device import LAST_USE, TURNS, CacheOnDevice, TokenOnDevice
from runtime.kernels.gpu.addressing import WORD
from runtime.kernels.gpu.device_cache import AHEAD, ON_DEMAND, DeviceCache
from runtime.kernels.load import kernels
from runtime.model.open import MoeModel
from runtime.tiers.fast import ResidentExperts


class DeviceRoad:
    """Computes tokens whose layers the device decides, by the kernels of
    `runtime.kernels.gpu.decide`.

    The device has the cache from the first such token until `give_back`. The host calls that before
    it decides itself again, as for a prompt. Meanwhile the controller's cache is out of date. The
    device sends its counters at the end of each pass. The host reads them at the end of a later
    pass, if they have come by then, or waits for them when counters are asked for. For an eviction
    policy whose order the host writes, the host does so before each token, once it knows which
    experts the token before used.

    Experts are copied on a separate stream: a layer's demands while its experts that are there are
    computed; then what is prefetched, while the others and the next layer's attention are computed.
    `prefetches` says whether that is done. `settle` is called before the device takes the cache: it
    makes compute wait for all copies that are under way.
    """

    def __init__(
        self,
        opened: MoeModel,
        books: CacheOnDevice,
        resident: ResidentExperts,
        output: TritonBackend,
        settle: Callable[[], None],
    ) -> None:
        slots = resident.slots
        self._books = books
        self._output = output
        self._settle = settle
        self._shape = opened.shape
        self._device = resident.slots.device
        # page-locked: the GPU reads it itself
        self._host = resident.slow.stores[FULL_BITS].buffer.view(torch.int32)
        self._arena = slots.arena.view(torch.int32)
        with torch.inference_mode(False):  # a session forwards within it, and `generate` without
            in_words = [start // WORD for start in slots.starts]
            self._in_words = torch.tensor(in_words, dtype=torch.int64, device=self._device)
            # by the number of a pass's tokens
            self._now = {1: self._for_experts(self._shape.top_k, 3)}
            self._ahead = self._for_experts(books.num_named, 2)
            ends = zip(books.first_slots, books.num_slots, strict=True)
            self._starts = [output.starts(range(first, first + count)) for first, count in ends]
        self.prefetches = books.num_named > 0
        self._branch = Branch(self._device) if host_copy.has_streams(self._device) else None
        self._learns = books.kind == TURNS
        self._least_slots = min(books.num_slots)
        self._num_counts = AHEAD if self.prefetches else ON_DEMAND
        self._num_told = self._num_counts + self._learns * self._shape.top_k  # of each layer
        self._letters = host_copy.NumberedLetters(
            self._device, self._num_told * self._shape.num_layers
        )
        self._turns = host_copy.page_locked(self._shape.num_keys, torch.int32).view(
            -1, self._shape.num_experts
        )
        # numbers of letters, the oldest first
        self._sent: deque[tuple[int, TokenOnDevice]] = deque()
        self._counting = threading.Lock()  # any thread may ask for counters
        books.counters.catch_up = self.catch_up
        self._cache: DeviceCache | None = None  # its addresses stay
        self._has_cache = self._is_in_token = self._is_queued = False
        self._counted = self._no_counts()
        # the choices [T, K] of a pass with drafts, by layer, until it is known which stay
        self._unsettled: list[torch.Tensor] = []

    def reason_not(self, num_tokens: int) -> str | None:
        """Return the reason why the device cannot decide a pass of that many tokens, all but the
        first drafts; None if it can."""
        if num_tokens > 1 and self.prefetches:
            return "the device prefetches for single tokens only"
        wanted = min(num_tokens * self._shape.top_k, self._shape.num_experts)
        return "its experts do not fit into a layer's slots" if wanted > self._least_slots else None

    def forward(
        self,
        layer: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        foreseen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute one layer of one token: hidden [1, H], ids and weights [1, K] as the router left
        them -> [1, H]. `foreseen` [1, E] is the distribution that the next layer's router gives for
        this one's input, where experts are prefetched."""
        if not self._is_in_token:
            self.begin_token()
        self._books.stepped(layer)
        return self.launch(layer, hidden, ids, weights, foreseen)

    def begin_token(self) -> None:
        """Make sure that the device has the cache and knows the time of this token."""
        self._is_in_token = True
        if self._branch:
            # the token before has joined it, and a capture that failed may not have
            self._branch.is_open = False
        if not self._has_cache:
            self._take_over()
        elif self._learns:
            self.catch_up()
            # the device has read it: the token before has ended
            self._turns.numpy()[:] = self._books.turns()
            self._cache.stamp.copy_(self._turns, non_blocking=True)
        self._clock = self._books.clock()
        self._cache.clock.fill_(self._clock)

    def replayed(self, chosen: list[torch.Tensor]) -> None:
        """Note that a graph has queued the steps of all layers, and the counters; `chosen` are the
        routers' choices [T, K]."""
        self._books.stepped(0, self._shape.num_layers)
        self._is_queued = True
        self._unsettled = chosen if len(chosen[0]) > 1 else []

    def settle(self, accepted: np.ndarray) -> None:
        """Note which of the tokens [T] of the pass that has ended are drafts that were accepted:
        their experts are used at the pass's last step. Call it before the next pass begins."""
        rows = np.flatnonzero(accepted).tolist()
        unsettled = self._unsettled
        self._unsettled = []
        if not rows or not unsettled:
            return
        chosen = torch.stack(unsettled)[:, rows]
        if self._learns:
            self.catch_up()  # the pass's own token comes first
            self._books.learn_accepted(chosen.cpu().numpy())
            return
        stamp = self._cache.stamp
        keys = chosen.flatten(1)
        if self._books.kind == LAST_USE:
            # a layer's stamps are of its own steps
            last = self._clock + torch.arange(len(keys), device=keys.device).flip(0)
            stamp.scatter_(1, keys, last.to(stamp)[:, None].expand_as(keys))
        else:
            stamp.scatter_add_(1, keys, torch.ones_like(keys, dtype=stamp.dtype))

    def queue_counters(self) -> None:
        """Make the device send its counters once nothing is under way; the host reads them when
        they have come."""
        self._join()
        self._letters.queue(self._cache.told)

    def launch(
        self,
        layer: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        foreseen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queue the kernels of `forward`, or of as many for a few tokens of which all but the first
        are drafts. They read and write at the same addresses each time."""
        decide = kernels("gpu.decide")
        ids = ids.contiguous()
        hits, arrivals, missing = self._room_for(len(ids))
        if is_ahead := foreseen is not None:
            foreseen = foreseen.contiguous()
        decide.resolve(self._cache, layer, ids, hits, arrivals, missing, is_ahead=is_ahead)
        if self._branch:
            self._branch.fork()
        with self._beside():
            self._fill(layer, arrivals, missing)
        starts = self._starts[layer]
        self._output.compute_at(starts, hits, hidden)
        self._join()
        output = self._output.forward_at(starts, arrivals, hidden, ids, weights)
        if is_ahead:
            self._prefetch(layer, foreseen)
        return output

    def end_pass(self) -> None:
        """Make the device send the counters of this pass if the pass took this road, and count the
        passes whose counters have come."""
        if self._is_in_token:
            if not self._is_queued:
                self.queue_counters()
            self._sent.append((self._letters.sent(), self._books.ended()))
            self._is_in_token = self._is_queued = False
            self._count_sent(waits=False)

    def catch_up(self) -> None:
        """Count all tokens that have ended. Waits for the device where it has not computed the last
        one yet."""
        self._count_sent(waits=True)

    def _prefetch(self, layer: int, foreseen: torch.Tensor) -> None:
        """Request the experts that the next layer is predicted to use, once the demands have come.
        Compute waits for the decision, but not for the experts."""
        decide = kernels("gpu.decide")
        slots, missing = self._ahead
        with self._beside():
            decide.resolve_ahead(
                self._cache,
                layer,
                foreseen,
                slots,
                missing,
                most=self._books.most_ahead,
                least=self._books.least_p,
            )
        self._join()  # also before the memory of `foreseen` is used again
        with self._beside():
            self._fill((layer + 1) % self._shape.num_layers, slots, missing)

    def _beside(self) -> AbstractContextManager[None]:
        """Queue beside compute, where the device has streams."""
        return self._branch.entered() if self._branch else nullcontext()

    def _join(self) -> None:
        """Make compute wait for the work beside it."""
        if self._branch:
            self._branch.join()

    def _fill(self, layer: int, slots: torch.Tensor, missing: torch.Tensor) -> None:
        first = {
            "first_key": layer * self._shape.num_experts,
            "first_slot": self._books.first_slots[layer],
        }
        decide = kernels("gpu.decide")
        decide.fill(self._host, self._in_words, self._arena, slots, missing, **first)

    def _count_sent(self, *, waits: bool) -> None:
        with self._counting:
            while self._sent and (
                waits or self._is_full or self._letters.has_come(self._sent[0][0])
            ):
                number, token = self._sent.popleft()
                told = self._letters.read(number).astype(np.int64).reshape(self._num_told, -1)
                counts = told[: self._num_counts]
                chosen = told[self._num_counts :]
                *moved, wanted = counts - self._counted
                self._books.count(token, *moved, wanted=wanted)
                self._counted = counts
                if self._learns:
                    self._books.learn(token, chosen.reshape(self._shape.num_layers, -1))

    @property
    def _is_full(self) -> bool:
        """True if the next letter would overwrite one that was not read."""
        return len(self._sent) == self._letters.COUNT

    def give_back(self) -> None:
        """Give the cache to the controller if the device has it. Waits for the device."""
        if self._has_cache:
            self.catch_up()
            self._books.take_back(*(one.cpu().numpy() for one in self._cache.kept()))
            self.clear()

    def clear(self) -> None:
        """Forget the device's cache, and a token that did not end."""
        self._join()
        self._has_cache = self._is_in_token = self._is_queued = False
        self._unsettled = []

    def _take_over(self) -> None:
        self.catch_up()  # the next counts begin at 0
        self._letters.skip()  # a token that failed may have sent one
        self._settle()
        with torch.inference_mode(False):
            tables = [
                torch.from_numpy(one).to(self._device) for one in astuple(self._books.hand_over())
            ]
            if self._cache is None:
                own = {
                    "num_slots": self._books.num_slots,
                    "kind": self._books.kind,
                    "num_told": self._num_told,
                }
                self._cache = DeviceCache.holding(*tables, **own)
            else:
                self._cache.hold(*tables)
        self._has_cache = True
        self._counted = self._no_counts()

    def _room_for(self, num_tokens: int) -> list[torch.Tensor]:
        """Return room for what is decided of a pass, [T, K] each."""
        if num_tokens not in self._now:
            with torch.inference_mode(False):
                self._now[num_tokens] = self._for_experts(self._shape.top_k, 3, num_tokens)
        return self._now[num_tokens]

    def _for_experts(self, count: int, num_fields: int, rows: int = 1) -> list[torch.Tensor]:
        """Return room for as many numbers of each of `count` experts, [rows, count] each."""
        return [
            torch.zeros(rows, count, dtype=torch.int32, device=self._device)
            for _ in range(num_fields)
        ]

    def _no_counts(self) -> np.ndarray:
        return np.zeros((self._num_counts, self._shape.num_layers), np.int64)
