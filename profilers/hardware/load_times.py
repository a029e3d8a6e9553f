"""Measures loading one expert over every link of a machine, and from a disk without cached
pages."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from artifacts.hardware.profile import COLD, DISK, PAGEABLE, PINNED, RAM, Load, Spread
from artifacts.shape import FULL_BITS
from runtime.control import sizes
from runtime.devices import is_host
from runtime.links.choose import open_link
from runtime.links.emulated import EmulatedLink
from runtime.links.link import DEMAND, ExpertSource, Link
from runtime.model.files.locate import weight_files
from runtime.model.layout import aligned
from runtime.model.open import MoeModel
from runtime.session.probe import seconds_of
from runtime.tiers.slow import SlowTier

LENGTHS = (16, 64, 256)
# experts that take turns; bytes that no processor cache holds
_FEW = 8
_MANY_NBYTES = 64 << 20
_PARTS = 4  # of an expert; loading one of them shows how seconds depend on bytes


@dataclass(frozen=True, slots=True)
class TimingEffort:
    """Effort of a measurement: `lengths` of prompts in tokens, `turns` of every measurement, with a
    third as many more to warm up. `deciding` is the number of tokens on which policies' own work is
    measured (0: not at all)."""

    lengths: tuple[int, ...] = LENGTHS
    turns: int = 30
    deciding: int = 0

    @property
    def warm_up(self) -> int:
        return self.turns // 3


THOROUGH = TimingEffort(deciding=6)
QUICK = TimingEffort(lengths=(16,), turns=20)


def loads(opened: MoeModel, folder: Path, of_run: str, effort: TimingEffort) -> Iterator[Load]:
    """Yield loads from the disk with the operating system's cache and, where the cache can be
    dropped, without; from RAM; and over the emulated link of a run."""
    device = opened.model.device
    shape = opened.shape
    nbytes = opened.store.layout.nbytes
    slots = torch.empty(num_few(nbytes, shape.num_keys), nbytes, dtype=torch.uint8, device=device)
    has_gpu = not is_host(device)
    held = _Held(opened, pin=False)

    def over(name: str, link_from: Callable[[ExpertSource], Link], source: _Held) -> Load:
        with _closing(link_from(source)) as link:
            return _load(
                name,
                _bring(link, slots, effort),
                nbytes,
                _latency(link_from, source, slots, effort),
            )

    link_of = partial(open_link, opened, device=device)
    with _closing(link_of(SlowTier.plain(opened.store))) as link:
        latency = _latency(link_of, held, slots, effort)
        yield _load(DISK, _bring(link, slots, effort), nbytes, latency)
        if cold := _bring_cold(link, slots, folder, effort):
            yield _load(COLD, cold, nbytes)
    if has_gpu:
        yield over(PINNED, partial(link_of, is_pinned=True), _Held(opened, pin=True))

    def bring(turn: int) -> None:
        slots[turn % len(slots)].copy_(held.experts[turn % len(slots)])

    copies = seconds_of(bring, device, warm_up=effort.warm_up, turns=effort.turns)
    yield _load(PAGEABLE if has_gpu else RAM, copies, nbytes)
    if of_run not in (DISK, PINNED):
        bandwidth, latency_s = sizes.rate(of_run)
        emulated = partial(EmulatedLink, shape=shape, bandwidth=bandwidth, latency_s=latency_s)
        yield over(of_run, emulated, held)


class _Held:
    """A source of a few experts in RAM, page-locked if `pin`."""

    def __init__(self, opened: MoeModel, *, pin: bool) -> None:
        nbytes = opened.store.layout.nbytes
        self.experts = [
            aligned(nbytes, pin=pin) for _ in range(num_few(nbytes, opened.shape.num_keys))
        ]
        for key, buffer in enumerate(self.experts):
            opened.store.read(*divmod(key, opened.shape.num_experts), buffer)
        self._num_experts = opened.shape.num_experts

    @property
    def stores(self) -> dict[int, "_Held"]:
        return {FULL_BITS: self}

    def part(self) -> "_Held":
        """Return a source of the first bytes of each expert."""
        source = copy(self)
        source.experts = [buffer[: _part(len(buffer))] for buffer in self.experts]
        return source

    def view(self, layer: int, expert: int, *, bits: int) -> torch.Tensor:
        return self.experts[layer * self._num_experts + expert]

    def read(self, layer: int, expert: int, out: torch.Tensor, *, bits: int) -> None:
        out.copy_(self.view(layer, expert, bits=bits))

    def read_kept(self, layer: int, expert: int, out: torch.Tensor) -> bool:
        self.read(layer, expert, out, bits=FULL_BITS)
        return True


def num_few(nbytes: int, num_keys: int) -> int:
    """Return how many experts of `nbytes` must take turns so that none stays in a processor
    cache."""
    return min(max(_FEW, _MANY_NBYTES // nbytes), num_keys)


def _part(nbytes: int) -> int:
    return -(-nbytes // _PARTS)


def _latency(
    link_from: Callable[[ExpertSource], Link],
    held: _Held,
    slots: torch.Tensor,
    effort: TimingEffort,
) -> Spread:
    """Measure the seconds of a load that do not depend on its bytes: loads of whole experts
    alternate with parts."""
    part = slots[:, : _part(slots.shape[1])]
    share = part.shape[1] / slots.shape[1]
    once = TimingEffort(turns=1)
    latencies = []
    with _closing(link_from(held)) as whole_link, _closing(link_from(held.part())) as part_link:
        for turn in range(effort.warm_up + effort.turns):
            [whole_s] = _bring(whole_link, slots, once, first=turn)
            [part_s] = _bring(part_link, part, once, first=turn)
            latencies.append((part_s - share * whole_s) / (1 - share))
    return Spread.of(latencies[effort.warm_up :])


@contextmanager
def _closing(link: Link) -> Iterator[Link]:
    try:
        yield link
    finally:
        link.drain_stalls()
        link.close()


def _bring(link: Link, slots: torch.Tensor, effort: TimingEffort, *, first: int = 0) -> list[float]:
    """Return the seconds of each turn's load, from the request to its end."""

    def bring(turn: int) -> None:
        key = (first + turn) % len(slots)
        link.collect(link.issue(key, slots[key], urgency=DEMAND))

    return seconds_of(bring, slots.device, warm_up=effort.warm_up, turns=effort.turns)


def _bring_cold(link: Link, slots: torch.Tensor, folder: Path, effort: TimingEffort) -> list[float]:
    """Return the same with the files dropped from the page cache before every turn; empty where
    that has no effect."""
    seconds = []
    once = TimingEffort(turns=1)
    before = _bytes_read()
    if before is None or not hasattr(os, "posix_fadvise"):
        return []
    for turn in range(effort.turns):
        _forget(folder)
        seconds += _bring(link, slots, once, first=turn)
    num_read = _bytes_read() - before
    return seconds if num_read >= effort.turns * slots[0].nbytes / 2 else []


def _forget(folder: Path) -> None:
    for path in weight_files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _bytes_read() -> int | None:
    """Return the bytes that this process has read from storage; None where the system does not
    count them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def _load(link: str, seconds: list[float], nbytes: int, latency: Spread | None = None) -> Load:
    spread = Spread.of(seconds)
    return Load(link, spread, nbytes / spread.median / 1e9, latency=latency)
