"""Executes plans: transformers calls it once per MoE layer in place of the experts' own forward.

One engine owns one model while it is installed: a hook begins every pass, and the registered experts function does the
rest.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from artifacts.errors import BadUsage, OutOfResources
from runtime.control.cache import RESIDENT
from runtime.control.controller import Controller
from runtime.control.plan import NO_SLOT, Place, Plan
from runtime.engine.across_devices import Apart
from runtime.engine.choose_output import fused_for
from runtime.engine.host_copy import on_host
from runtime.engine.output_cpu import Fused, OneToken
from runtime.engine.output_gpu import FusedCuda
from runtime.engine.output_torch import StepSum
from runtime.engine.routers import Watcher
from runtime.kernels.batched import is_worth_batching
from runtime.links.link import DEMAND, PREFETCH, Transfer
from runtime.model.arithmetic import assign, gather
from runtime.model.open import MoeLayer, MoeModel
from runtime.policies.base import Step
from runtime.tiers.fast import Resident, is_full
from runtime.tiers.open import Tiers
from runtime.tiers.shadow_replicas import Shadows
from runtime.tiers.slots import Slots

NAME = "moectl"
Output = StepSum | Fused | FusedCuda  # what takes a step's experts as they are computed


def _experts_function(
    module: nn.Module, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What ALL_EXPERTS_FUNCTIONS calls: hidden [T, H], ids and weights [T, K] -> [T, H]."""
    return module.moectl_forward(hidden, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_function)


class Engine:
    """Runs a model's experts by a controller's plans; `slots` are the fast tier, with the replicas `shadows` beside
    them if any stay."""

    def __init__(
        self,
        opened: MoeModel,
        controller: Controller,
        watcher: Watcher,
        *,
        tiers: Tiers,
        slots: Slots,
        shadows: Shadows | None,
        is_fused: bool,
    ) -> None:
        self.controller, self.link, self.near = controller, tiers.link, tiers.near
        self.watcher = watcher
        self.stall_s: list[float] = []
        self.num_not_landed = 0
        self._opened, self._slow, self._shadows, self._is_fused = opened, tiers.slow, shadows, is_fused
        self._together = None if is_fused or slots.are_apart else tiers.slow.together(opened)
        self._awaits_all = tiers.link.side_by_side and shadows is None and is_worth_batching(opened)
        self.lay_out(slots)
        self._may_be_settled = (controller.holds_all or controller.holds_low) and not slots.are_apart
        self._pending: dict[int, Transfer] = {}
        self._handles: list = []
        self._is_in_pass = self._is_unsettled = False
        self._num_whole = 0  # passes that came to their end

    def install(self) -> None:
        """Raises BadUsage where another engine has the model."""
        model = self._opened.model
        if any(hasattr(layer.experts, "moectl_forward") for layer in self._opened.layers):
            raise BadUsage("the model runs in another session: close that one first, or open the model twice")
        model.set_experts_implementation(NAME)
        for layer in self._opened.layers:
            layer.experts.moectl_forward = self._layer_forward(layer)
        self._handles.append(model.register_forward_pre_hook(self._begin_pass, with_kwargs=True))
        self._handles.append(model.register_forward_hook(self._end_pass))

    def uninstall(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.watcher.stop()
        for layer in self._opened.layers:
            layer.experts.__dict__.pop("moectl_forward", None)
        self._opened.model.set_experts_implementation("eager")

    def forget(self) -> None:
        """Drop every expert from the fast tier, as after a failed step, when slots may hold anything; and what was
        counted of a pass that came to no end. May be broken off itself: the next pass begins with it then."""
        self._is_unsettled = True
        self._pending.clear()
        self.link.drop()  # also what had been issued and not yet been noted
        self.controller.forget()
        self.controller.counters.forget(self._num_whole)
        if isinstance(self._fused, FusedCuda):
            self._fused.whole.clear()

    def fold(self) -> None:
        """Add up what was counted of all passes so far, as if they had been one: there are as many as tokens."""
        self.controller.counters.fold()
        self._num_whole = len(self.controller.counters.passes)
        self.stall_s[:] = [sum(self.stall_s)] * self._num_whole

    def let_go(self) -> None:
        """Forget the slots, which others are to follow. Between passes. Raises OutOfResources, and keeps them, where
        one is still being written."""
        self._pending.clear()
        self.link.drop()
        try:
            self.link.settle()
        except OutOfResources:
            self.forget()
            raise
        for arena in self._resident.slots.arenas:
            if arena.device.type == "cuda":
                torch.cuda.synchronize(arena.device)  # a copy that has begun may still write to what goes
        del self._resident, self._fused, self._packed

    def lay_out(self, slots: Slots) -> None:
        """The fast tier is these slots from here on, and empty."""
        self._resident = Resident(self._opened, slots, self._slow, self._shadows)
        self._fused = fused_for(self._opened)(self._opened, self._resident) if self._is_fused else None
        has_packed = not self._is_fused and Fused.suits(self._opened)  # what is fused computes them itself
        self._packed = OneToken(self._opened, self._resident) if has_packed else None

    def validate(self) -> None:
        """Raise AssertionError where, between passes, books, slots and transfers contradict each other."""
        self.controller.validate()
        states, resident = self.controller.cache.states, self._resident
        held = {place.slot: place for place in self.controller.cache.places if place}
        assert len(resident.slots) == self.controller.cache.num_slots, f"{len(resident.slots)} slots"
        for slot, place in held.items():
            own, device = resident.slots.device_of[slot], self.controller.cache.partitions.of(place.key)
            assert own == device, f"key {place.key} of device {device} is in slot {slot} of device {own}"
            size, room = self._slow.num_bytes(place), len(resident.slots[slot])
            assert size <= room, f"key {place.key} takes {size} bytes, and slot {slot} has {room}"
            transfer = self._pending.get(slot)
            is_its = transfer is not None and (transfer.key, transfer.bits) == (place.key, place.bits)
            assert is_its or transfer is None, f"slot {slot} is key {place.key}'s, and {transfer.key} comes into it"
            assert is_its or states[place.key] == RESIDENT, f"key {place.key} is loading, and nothing brings it"

    def _begin_pass(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._is_in_pass:  # the one before was broken off, wherever that was
            self.forget()
        if self._is_unsettled:
            self.link.settle()
            self.link.drain_stalls()
            self._is_unsettled = False
        self._is_in_pass = True
        self.controller.begin_pass(self.watcher.begin_pass(args, kwargs))

    def _end_pass(self, model: nn.Module, args: tuple, output: object) -> None:
        self.stall_s.append(self.link.drain_stalls())
        self._num_whole = len(self.controller.counters.passes)
        self._is_in_pass = False

    # One step

    def _layer_forward(self, layer: MoeLayer) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        def forward(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            try:
                if self._settles_on_device(layer.index, hidden):
                    return self._fused.settled(layer.index, hidden, ids, weights)
                return self._step(layer, hidden, ids, weights)
            except BaseException:
                self.forget()
                raise

        return forward

    def _settles_on_device(self, layer: int, hidden: torch.Tensor) -> bool:
        """Whether a token's layer needs nothing of the host, which need not even know where its router sends it."""
        if not (isinstance(self._fused, FusedCuda) and self.controller.holds_all and len(hidden) == 1):
            return False
        if self._pending or self.watcher.on_step is not None:
            return False
        if layer not in self._fused.whole:
            if not self.controller.is_whole(layer):
                return False
            first, num_experts = layer * self.controller.shape.num_experts, self.controller.shape.num_experts
            places = self.controller.cache.places[first : first + num_experts]
            self._fused.know(layer, [place.slot for place in places])
        self.controller.count_settled(layer)
        return True

    def _step(self, layer: MoeLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self._may_be_settled and len(hidden) == 1 and self.watcher.on_step is None:
            experts = ids.tolist()[0]
            if places := self.controller.settled(layer.index, experts):
                return self._decode(layer, hidden, experts, places, weights)
        step = self.watcher.step(layer.index, ids, weights)
        plan = self.controller.step(step)
        output = self._output(layer, hidden, plan, step, weights)
        self._compute(layer, plan, hidden, output)
        return output.finish()

    def _output(self, layer: MoeLayer, hidden: torch.Tensor, plan: Plan, step: Step, weights: torch.Tensor) -> Output:
        """What takes the step's experts as they are computed."""
        if self._fused and len(hidden) == 1:
            own = step.weights if plan.weights is None else plan.weights
            self._fused.begin(layer.experts, hidden, plan.selected[0].tolist(), own[0])
            return self._fused
        if plan.weights is not None:
            weights = self._reweighted(plan.weights, weights)
        selected = self._all_rows(plan.selected, len(hidden))
        if isinstance(self._fused, FusedCuda):
            self._fused.begin_many(layer.experts, hidden, selected, weights)
            return self._fused
        assigned = assign(selected, hidden.device)
        return StepSum(
            layer.experts,
            self._resident,
            self._together,
            self._packed,
            hidden=hidden,
            assigned=assigned,
            weights=weights,
            apart=Apart(self._resident, hidden, selected) if self._resident.slots.are_apart else None,
        )

    def _decode(
        self, layer: MoeLayer, hidden: torch.Tensor, experts: list[int], places: list[Place], weights: torch.Tensor
    ) -> torch.Tensor:
        """One token whose experts are all there: [1, H]. A call more takes as long as a small expert."""
        if self._fused:
            return self._fused.forward(hidden, experts, places, weights)
        shares = (self._outputs(layer, hidden, places) * weights.reshape(-1, 1, 1)).to(hidden.dtype).unbind()
        first, *others = sorted(range(len(experts)), key=experts.__getitem__)
        out = shares[first]  # a sum that starts from zeros, as eager's, would differ in the sign of a zero alone
        for rank in others:
            out += shares[rank]
        return out

    def _outputs(self, layer: MoeLayer, hidden: torch.Tensor, places: list[Place]) -> torch.Tensor:
        """What each expert, all of them packed or none, makes of a token [1, H]: [n, 1, H]."""
        if self._packed and self._packed.is_packed(places[0].bits):
            return self._packed.outputs(hidden, places, self._packed.starts(places))
        if self._together and self.controller.holds_all:
            views = [self._resident.whole(place.slot) for place in places]
            return self._together.forward(layer.experts, views, hidden)
        return torch.stack([self._resident.forward(layer.experts, place, hidden) for place in places])

    def _compute(self, layer: MoeLayer, plan: Plan, hidden: torch.Tensor, output: Output) -> None:
        """Every used expert: residents first, near ones while loads are under way, arrivals last."""
        self.near.begin(plan.near)
        if not plan.waves:
            self._issue(plan.prefetches, PREFETCH)
        else:
            self._issue(plan.waves[0].loads, DEMAND)
        if plan.low:
            output.add(plan.low)
        for wave, following in plan.in_turn():
            if wave is plan.waves[-1]:
                self._issue(plan.prefetches, PREFETCH)
            coming = [place for place in (*wave.resident, *wave.loads) if place.slot in self._pending]
            ready = [place for place in wave.resident if place.slot not in self._pending]
            if plan.near and wave is plan.waves[0]:
                if following or not self._add_together(plan.near, ready, hidden, output):
                    self._add(ready, output, following)
                    self._compute_near(layer, plan.near, hidden, output)
                ready = []
            self._add_arrivals(hidden, coming, ready, output, following)
            self._issue(tuple(following.values()), DEMAND)
        if not plan.waves and not self._add_together(plan.near, [], hidden, output):
            self._compute_near(layer, plan.near, hidden, output)
        self.near.finish()

    def _add_arrivals(
        self,
        hidden: torch.Tensor,
        coming: list[Place],
        ready: list[Place],
        output: Output,
        following: dict[int, Place],
    ) -> None:
        """Compute what is `ready`, then the others as they land; what has landed by then in one go with it."""
        if self._awaits_all and len(hidden) == 1:  # together they take less than one by one beside threads that read
            for place in reversed(coming):  # the last is there when hardly another is under way: one wait, not one each
                self.link.collect(self._pending[place.slot])
        for place in coming:
            if ready and not self.link.has_landed(self._pending[place.slot]):
                self._add(ready, output, following)
                ready = []
            ready.append(self._arrived(place))
        if ready:
            self._add(ready, output, following)

    def _add(self, places: list[Place], output: Output, following: dict[int, Place]) -> None:
        """Compute what is there; what is `following` into a slot sets out as soon as that is free."""
        if not following:
            output.add(places)
            return
        for place in places:
            output.add([place])
            if load := following.pop(place.slot, None):
                self._issue((load,), DEMAND)

    def _arrived(self, place: Place) -> Place:
        """Where to compute an expert: in its slot once it is there, or on the replica that stays rather than wait."""
        if self._shadows and not self.link.has_landed(self._pending[place.slot]):
            self.num_not_landed += 1
            return Place(place.key, NO_SLOT, int(self.controller.cache.shadows[place.key]))
        self.link.collect(self._pending.pop(place.slot))
        return place

    def _add_together(self, near: tuple[Place, ...], ready: list[Place], hidden: torch.Tensor, output: Output) -> bool:
        """A token's near experts in one go with those that are `ready`, where whoever computes them is the same and
        that gives the same bits."""
        if not near or not self._together or len(hidden) > 1:
            return False
        if any(output.computes(place) or not is_full(place) for place in (*near, *ready)):
            return False
        if weights := self.near.lying(near):
            output.add_together([*near, *ready], [*weights, *map(self._resident.weights, ready)])
        return bool(weights)

    def _compute_near(self, layer: MoeLayer, places: tuple[Place, ...], hidden: torch.Tensor, output: Output) -> None:
        """Add what is computed near."""
        host = hidden.cpu() if places else hidden
        for place in places:
            if output.computes(place):
                output.add_elsewhere(place, self.near.content(place))
                continue
            expert = place.key % self.controller.shape.num_experts
            x = gather(host, on_host(output.assigned(expert)))
            output.add_output(expert, self.near.forward(layer.experts, place, x).to(hidden.device, non_blocking=True))

    def _issue(self, loads: tuple[Place, ...], urgency: int) -> None:
        for place in loads:
            if place.slot in self._pending:
                self.link.cancel(self._pending.pop(place.slot))
            slot = self._resident.room(place)
            self._pending[place.slot] = self.link.issue(place.key, slot, urgency=urgency, bits=place.bits)

    def _all_rows(self, selected: np.ndarray, num_rows: int) -> np.ndarray:
        """[rows, K]: padding rows have no expert."""
        if self.watcher.rows is None:
            return selected
        full = np.full((num_rows, selected.shape[1]), -1, np.int64)
        full[self.watcher.rows] = selected
        return full

    def _reweighted(self, new: np.ndarray, weights: torch.Tensor) -> torch.Tensor:
        full = torch.from_numpy(np.ascontiguousarray(new)).to(weights)
        if self.watcher.rows is None:
            return full
        rows = torch.from_numpy(self.watcher.rows).to(weights.device)
        return torch.zeros_like(weights).index_copy_(0, rows, full)
