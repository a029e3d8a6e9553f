"""The engine: runs a model's experts by a controller's plans, inside the model's own forward.

transformers calls one registered function for every MoE layer, in place of the experts' own
forward. One engine owns one model while it is installed. `runtime.engine.step` executes the steps.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from artifacts.errors import BadUsage, OutOfResources
from runtime import devices
from runtime.control.cache import RESIDENT
from runtime.control.controller import Controller
from runtime.control.on_device import CacheOnDevice
from runtime.engine.captured_tokens import CapturedTokens
from runtime.engine.device_road import DeviceRoad
from runtime.engine.routers import Watcher
from runtime.engine.step import StepExecutor
from runtime.kernels.cpu.decoder.decoder import CompiledDecoder
from runtime.kernels.cpu.threads import KernelThreads
from runtime.model.open import MoeLayer, MoeModel
from runtime.policies.step import Opening
from runtime.tiers.open import Tiers
from runtime.tiers.shadow_replicas import Shadows
from runtime.tiers.slots import Slots

NAME = "moectl"


def _experts_function(
    module: nn.Module, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The entry of ALL_EXPERTS_FUNCTIONS: hidden [T, H], ids and weights [T, K] -> [T, H]."""
    return module.moectl_forward(hidden, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_function)


class Engine:
    """Runs a model's experts by a controller's plans. The fast tier is `slots` and, if given, the
    replicas `shadows`.

    With `on_device` tokens that are alone in their pass take the `road` on which the device
    decides, unless plans are asked for (`steps.on_plan`); there is then no split that would lay
    slots out anew. `drafts` computes all layers of passes that draft in one call.

    `stall_s` has the exposed stall of each pass in seconds. `captured` replays decoded tokens as
    CUDA graphs, where kernels compute the experts and the device has graphs.
    """

    def __init__(
        self,
        opened: MoeModel,
        controller: Controller,
        watcher: Watcher,
        *,
        tiers: Tiers,
        slots: Slots,
        shadows: Shadows | None,
        threads: KernelThreads,
        is_fused: bool,
        on_device: CacheOnDevice | None = None,
        drafts: CompiledDecoder | None = None,
    ) -> None:
        self.controller = controller
        self.watcher = watcher
        self.steps = StepExecutor(
            opened,
            controller,
            watcher,
            tiers=tiers,
            slots=slots,
            shadows=shadows,
            threads=threads,
            is_fused=is_fused,
        )
        backend = self.steps.backend
        resident = self.steps.resident
        settle = self._settle
        self.road = DeviceRoad(opened, on_device, resident, backend, settle) if on_device else None
        can_capture = backend.needs_no_host and devices.has_graphs(opened.model.device)
        self.captured = (
            CapturedTokens(opened, self.steps, self.road, watcher, self.clear)
            if can_capture
            else None
        )
        self._drafts = drafts
        self.stall_s: list[float] = []
        self._opened = opened
        self._slow = tiers.slow
        self._handles: list = []
        self._loads_all = controller.holds_all and tiers.link.is_queued
        self._is_in_pass = self._must_wait = False
        self._num_finished = 0  # passes that ran to their end

    def install(self) -> None:
        """Take over the model's experts. Raises BadUsage where another engine has the model."""
        model = self._opened.model
        if any(hasattr(layer.experts, "moectl_forward") for layer in self._opened.layers):
            raise BadUsage(
                "the model runs in another session: close that one first, or open the model twice"
            )
        model.set_experts_implementation(NAME)
        for layer in self._opened.layers:
            layer.experts.moectl_forward = self._layer_forward(layer)
        self._handles.append(model.register_forward_pre_hook(self._begin_pass, with_kwargs=True))
        self._handles.append(model.register_forward_hook(self._end_pass))
        if self.captured:
            self.captured.install()
        if self._loads_all:  # a layer that lacks one expert would ask the host which it needs
            self.steps.load_all()

    def uninstall(self) -> None:
        """Give the model its own experts back."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.captured:
            self.captured.uninstall()
        self.watcher.stop()
        for layer in self._opened.layers:
            layer.experts.__dict__.pop("moectl_forward", None)
        self._opened.model.set_experts_implementation("eager")
        self.controller.counters.catch_up()

    def settle(self, accepted: np.ndarray) -> None:
        """Note which of the tokens [T] of the pass that has ended are drafts that were accepted,
        where their uses are kept: see `Controller.settle`."""
        if self.road:
            self.road.settle(accepted)
        self.controller.settle(accepted)

    def clear(self) -> None:
        """Empty the fast tier, whose slots may hold anything after a failed step, and drop the
        counts of the unfinished pass. An interrupt may end this call early; the next pass then
        begins with another one."""
        self._must_wait = True
        if self.captured:
            self.captured.drop()
        self.steps.clear()
        if self.road:
            self.road.clear()
        self.controller.clear()
        self.controller.counters.truncate(self._num_finished)

    def fold(self) -> None:
        """Add up the counts of all passes so far as if they had been one: there are as many passes
        as tokens."""
        self.controller.counters.fold()
        self._num_finished = len(self.controller.counters.passes)
        self.stall_s[:] = [sum(self.stall_s)] * self._num_finished

    def release_slots(self) -> None:
        """Drop every reference to the slots, so that their memory can be used for others. Call it
        between passes and follow it with `lay_out`. Raises OutOfResources, and keeps the slots,
        where a copy into one does not end."""
        if self.captured:
            self.captured.drop()
        try:
            self.steps.release_slots()
        except OutOfResources:
            self.clear()
            raise

    def lay_out(self, slots: Slots) -> None:
        """Use these slots, all empty, as the fast tier from here on."""
        self.steps.lay_out(slots)

    def open_pass(self, opening: Opening) -> None:
        """Prefetch the experts that a policy proposes before the first layer has run; call it once
        the input is embedded."""
        try:
            self.steps.open_pass(opening)
        except BaseException:
            self.clear()
            raise

    def validate(self) -> None:
        """Raise AssertionError where, between passes, books, slots and transfers contradict each
        other. Takes the cache back where a device has it."""
        if self.road:
            self.road.give_back()
        self.controller.validate()
        states = self.controller.cache.states
        resident = self.steps.resident
        pending = self.steps.pending
        held = {place.slot: place for place in self.controller.cache.places if place}
        assert len(resident.slots) == self.controller.cache.num_slots, (
            f"{len(resident.slots)} slots"
        )
        for slot, place in held.items():
            own = resident.slots.device_of[slot]
            device = self.controller.cache.partitions.of(place.key)
            assert own == device, (
                f"key {place.key} of device {device} is in slot {slot} of device {own}"
            )
            size = self._slow.num_bytes(place)
            room = len(resident.slots[slot])
            assert size <= room, f"key {place.key} takes {size} bytes, and slot {slot} has {room}"
            transfer = pending.get(slot)
            is_its = transfer is not None and (transfer.key, transfer.bits) == (
                place.key,
                place.bits,
            )
            assert is_its or transfer is None, (
                f"slot {slot} is key {place.key}'s, and {transfer.key} comes into it"
            )
            assert is_its or states[place.key] == RESIDENT, (
                f"key {place.key} is loading, and nothing brings it"
            )

    @contextmanager
    def drafting(self) -> Iterator[list[np.ndarray]]:
        """Run a pass with the experts that are there, or their resident replicas. It loads nothing,
        and neither counters nor observers see it. Yields the routers' choice [T, K] by layer."""
        if self.road:
            self.road.give_back()
        self.steps.is_drafting = True
        self.steps.chosen = chosen = []
        try:
            with self._drafts.all_layers(self.steps) if self._drafts else nullcontext():
                yield chosen
        finally:
            self.steps.is_drafting = False

    def _begin_pass(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.steps.is_drafting and not (self._is_in_pass or self._must_wait):
            return
        if self._is_in_pass:  # the previous pass did not end, wherever it failed
            self.clear()
        if self._must_wait:
            self.steps.link.wait_for_copies()
            self.steps.link.drain_stalls()
            if self._loads_all:
                self.steps.load_all()
            self._must_wait = False
        self._is_in_pass = True
        num_tokens = self.watcher.begin_pass(args, kwargs)
        self.controller.begin_pass(num_tokens, num_drafts=self.watcher.num_drafts)
        self.watcher.open_pass(kwargs)

    def _end_pass(self, model: nn.Module, args: tuple, output: object) -> None:
        if self.steps.is_drafting and not self._is_in_pass:
            return
        if self.road:
            with devices.made_current(self._opened.model.device):
                self.road.end_pass()
        self.stall_s.append(self.steps.link.drain_stalls())
        self._num_finished = len(self.controller.counters.passes)
        self._is_in_pass = False
        self._slow.check_unchanged()  # before anything is made of this pass's logits

    def _layer_forward(
        self, layer: MoeLayer
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        run = self._run_by_either if self.road else self.steps.run
        captured = self.captured

        def forward(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            if captured and captured.launch:
                return captured.launch(layer, hidden, ids, weights)
            try:
                return run(layer, hidden, ids, weights)
            except BaseException:
                self.clear()
                raise

        return devices.run_there(self._opened.model.device, forward)

    def _run_by_either(
        self, layer: MoeLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Do the same as `StepExecutor.run`, but let the device decide a single token unless plans
        are asked for. Its step is copied to the host if there is an observer."""
        if hidden.shape[0] > 1 or self.steps.on_plan is not None or self.steps.is_drafting:
            self.road.give_back()
            return self.steps.run(layer, hidden, ids, weights)
        foreseen = None
        if self.watcher.on_step is not None:
            step = self.watcher.step(layer.index, ids, weights)
            if self.road.prefetches:
                foreseen = torch.from_numpy(step.predicted[:, 0]).to(hidden.device)
        elif self.road.prefetches:
            foreseen = self.watcher.foreseen(layer.index)
        return self.road.forward(layer.index, hidden, ids, weights, foreseen)

    def _settle(self) -> None:
        """Make compute wait for every copy that is under way."""
        pending = self.steps.pending
        self.steps.link.collect_all([*pending.values()])
        pending.clear()
