"""Parts of a session, and the observers of every pass and step: a recorder, and the solver of a new
split."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from artifacts.quantisation.widths import Width
from artifacts.shape import FULL_BITS
from runtime.backends.backend import Backend
from runtime.control.controller import Controller
from runtime.control.pools import Partitions
from runtime.control.splits.resplit import Reconfiguration, tokens_between
from runtime.devices import is_host
from runtime.engine.engine import Engine
from runtime.engine.routers import Watcher
from runtime.kernels.cpu.decoder.decoder import CompiledDecoder
from runtime.kernels.cpu.threads import KernelThreads
from runtime.kernels.gpu.dense.decoder import TritonDecoder
from runtime.model.dense_memory import on_cpu
from runtime.model.layout import Layout
from runtime.model.open import MoeModel
from runtime.policies import Policies
from runtime.policies.base import FastTier, Origin
from runtime.policies.presets import Scope
from runtime.policies.step import Step
from runtime.session.settings import Settings
from runtime.tiers.open import LinkChoice, Tiers
from runtime.tiers.shadow_replicas import Shadows
from runtime.tiers.slots import Slots


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices that the settings lead to for this model on these devices. Only the model is open
    yet."""

    opened: MoeModel
    settings: Settings
    policies: Policies  # prepared
    scope: Scope
    budget: str
    partitions: Partitions
    devices: tuple[torch.device, ...]
    fast: FastTier
    # the compiled code for experts of this family, if there is any
    fused: type[Backend] | None
    is_fused: bool  # whether that code computes them
    # the compiled modules beside the experts, if they were asked for
    dense: CompiledDecoder | TritonDecoder | None
    threads: KernelThreads  # of compiled code
    link: LinkChoice
    maps_run: int | None  # the run in the store that the expert maps come from
    origins: Mapping[str, Origin]  # the runs that the artefacts come from, used or not


@dataclass(frozen=True, slots=True)
class Parts(Choices):
    """Everything that a session runs with. A split that is solved anew replaces `fast` and `slots`
    and nothing else."""

    slots: Slots
    shadows: Shadows | None
    tiers: Tiers
    window: int  # bytes that a step may prefetch
    controller: Controller
    watcher: Watcher
    engine: Engine

    @property
    def fast_nbytes(self) -> int:
        """Bytes of the slots and of the replicas beside them."""
        return self.slots.nbytes + (self.shadows.nbytes if self.shadows else 0)

    @property
    def memory(self) -> dict[str, list[torch.Tensor]]:
        """The tensors in the CPU's memory: slots, replicas, dense weights and experts in RAM."""
        in_ram = [
            store.buffer for store in self.tiers.slow.stores.values() if store.buffer is not None
        ]
        held = {
            "slots": self.slots.arenas,
            "replicas": [self.shadows.buffer] if self.shadows else [],
            "dense": [parameter.data for parameter in on_cpu(self.opened.model)],
            "ram": in_ram,
        }
        on_cpu_only = {
            name: [one for one in tensors if is_host(one.device)] for name, tensors in held.items()
        }
        return {name: tensors for name, tensors in on_cpu_only.items() if tensors}

    @property
    def computed_widths(self) -> list[Width]:
        """Bits at which experts are computed below the checkpoint's precision."""
        resident = () if self.fast.shadows is None else self.fast.shadows.tolist()
        return sorted({self.opened.base, *self.policies.widths, *resident} - {FULL_BITS})

    @property
    def packed_widths(self) -> list[Width]:
        """Bits of the replicas, in the slow tier or resident, that lie in packed codes."""
        return sorted({layout.bits for layout in self._layouts if layout.codes == "packed"})

    @property
    def has_trellis(self) -> bool:
        """True if any replicas lie in trellis codes."""
        return any(layout.codes == "trellis" for layout in self._layouts)

    @property
    def _layouts(self) -> list[Layout]:
        in_slow = [store.layout for store in self.tiers.slow.stores.values()]
        resident = [*self.shadows.layouts.values()] if self.shadows else []
        return in_slow + resident


class StepObserver(Protocol):
    """Receiver of every pass and every step, such as a Recorder."""

    def begin_pass(self, requests: np.ndarray) -> None: ...

    def add(self, step: Step) -> None: ...

    def settle(self, rejected: np.ndarray, in_vain: np.ndarray) -> None: ...


def observe(watcher: Watcher, observer: StepObserver) -> None:
    """Add an observer: it gets every pass and step from here on, after the observers before it."""
    watcher.on_pass = _both(watcher.on_pass, observer.begin_pass)
    watcher.on_step = _both(watcher.on_step, observer.add)
    watcher.on_settle = _both(watcher.on_settle, observer.settle)


def _both(first: Callable[..., None] | None, second: Callable[..., None]) -> Callable[..., None]:
    if first is None:
        return second

    def call_both(*given: Any) -> None:
        first(*given)
        second(*given)

    return call_both


def reconfiguration(parts: Parts, *, lay_out: Callable[[FastTier], None]) -> Reconfiguration | None:
    """Return the observer that solves the split anew between requests and calls `lay_out` with a
    changed one; None if the settings or the split exclude it. Raises BadUsage where it is asked for
    and not possible."""
    every = tokens_between(
        parts.settings.reconfigure_every,
        parts.fast.split,
        parts.policies,
        num_devices=parts.settings.devices,
    )
    if not every:
        return None
    solver = Reconfiguration(
        parts.policies, parts.opened.shape, parts.fast.split, every=every, lay_out=lay_out
    )
    observe(parts.watcher, solver)
    return solver
