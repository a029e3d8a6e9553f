"""Parts of a session."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from artifacts.quantisation.widths import Width
from artifacts.shape import FULL_BITS
from runtime.backends.backend import Backend
from runtime.control.controller import Controller
from runtime.control.pools import Partitions
from runtime.engine.engine import Engine
from runtime.engine.routers import Watcher
from runtime.kernels.cpu.decoder import CompiledDecoder
from runtime.kernels.cpu.threads import KernelThreads
from runtime.model.dense_memory import on_cpu
from runtime.model.open import MoeModel
from runtime.policies import Policies
from runtime.policies.base import FastTier, Origin
from runtime.policies.presets import Scope
from runtime.session.settings import Settings
from runtime.tiers.open import LinkChoice, Tiers
from runtime.tiers.ram import RamStore
from runtime.tiers.replica_layouts import ReplicaLayout, TrellisLayout
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
    dense: CompiledDecoder | None  # the compiled modules beside the experts, if they were asked for
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
            store.buffer for store in self.tiers.slow.stores.values() if isinstance(store, RamStore)
        ]
        held = {
            "slots": self.slots.arenas,
            "replicas": [self.shadows.buffer] if self.shadows else [],
            "dense": [parameter.data for parameter in on_cpu(self.opened.model)],
            "ram": in_ram,
        }
        on_cpu_only = {
            name: [one for one in tensors if one.device.type == "cpu"]
            for name, tensors in held.items()
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
        return sorted(
            {
                layout.bits
                for layout in self._replica_layouts
                if not isinstance(layout, TrellisLayout)
            }
        )

    @property
    def has_trellis(self) -> bool:
        """True if any replicas lie in trellis codes."""
        return any(isinstance(layout, TrellisLayout) for layout in self._replica_layouts)

    @property
    def _replica_layouts(self) -> list[ReplicaLayout]:
        in_slow = [store.layout for store in self.tiers.slow.stores.values()]
        resident = [*self.shadows.layouts.values()] if self.shadows else []
        return [layout for layout in in_slow + resident if isinstance(layout, ReplicaLayout)]
