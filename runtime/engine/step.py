"""One step: asks the controller for the plan of a layer, issues its loads, and computes its experts
as they arrive."""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch

from runtime.backends.backend import Backend, StepTokens
from runtime.backends.choose import open_backend
from runtime.backends.cpu.present import PresentExperts
from runtime.control.controller import Controller
from runtime.control.plan import NO_SLOT, Place, Plan
from runtime.devices import wait_for_all
from runtime.engine.routers import Watcher
from runtime.kernels.batched import is_worth_batching
from runtime.kernels.cpu.decoder.compiled_layers import WholeExperts
from runtime.kernels.cpu.threads import KernelThreads
from runtime.links.cuda_flags import FlaggedCopies
from runtime.links.link import DEMAND, PREFETCH, Transfer, Wanted
from runtime.model.open import MoeLayer, MoeModel
from runtime.policies.step import Opening, Step
from runtime.tiers.fast import ResidentExperts
from runtime.tiers.open import Tiers
from runtime.tiers.shadow_replicas import Shadows
from runtime.tiers.slots import Slots


class StepExecutor:
    """Executes the controller's plans, one MoE layer of one pass at a time.

    `pending` has the transfers that were issued and not collected, by slot. `num_not_landed` counts
    experts that the controller took for resident, but that had not landed and were therefore
    computed on the replica beside the slots. `last_token` has, by layer, the plan of the last pass
    in which each answer got one token, or the router's choice [1, K] where nothing was left to
    plan. `on_plan` is called with every step that was planned, and its plan. `can_skip_planning`
    says that experts, or the replicas in their place, never leave once they are there. While it
    `is_drafting`, experts are taken as they are there, and observers are not called; `chosen` has
    the routers' choice [T, K] by layer.
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
    ) -> None:
        self.controller = controller
        self.watcher = watcher
        self.link = tiers.link
        self.near = tiers.near
        self.pending: dict[int, Transfer] = {}
        self._flagged: FlaggedCopies | None = None  # by which a token is loaded that is one graph
        self.num_not_landed = 0
        self.is_drafting = False
        self.chosen: list[np.ndarray] = []
        self.last_token: dict[int, Plan | torch.Tensor] = {}
        self.on_plan: Callable[[Step, Plan], None] | None = None
        self._opened = opened
        self._slow = tiers.slow
        self._shadows = shadows
        # where no policy computes on replicas they are for drafts alone, and loads are waited for
        self._may_replace = shadows is not None and controller.reads_shadows
        self._is_fused = is_fused
        self._threads = threads
        self._batched = None if is_fused or slots.are_apart else tiers.slow.together(opened)
        self._waits_for_all = (
            tiers.link.is_concurrent and shadows is None and is_worth_batching(opened)
        )
        self.can_skip_planning = (
            controller.holds_all or controller.holds_low
        ) and not slots.are_apart
        self.lay_out(slots)

    def lay_out(self, slots: Slots) -> None:
        """Use these slots, all empty, as the fast tier from here on."""
        opened = self._opened
        self.resident = ResidentExperts(
            opened, slots, self._slow, self._shadows, is_fused=self._is_fused
        )
        self.backend = open_backend(
            opened, self.resident, self._threads, batched=self._batched, is_fused=self._is_fused
        )
        self._computes_layers = self.backend.computes_layers
        vars(self).pop("_present", None)  # of other slots

    def release_slots(self) -> None:
        """Drop every reference to the slots. Raises OutOfResources where a copy into one does not
        end."""
        self.pending.clear()
        self._end_flagged()
        self.link.clear()
        self.link.wait_for_copies()
        for arena in self.resident.slots.arenas:
            wait_for_all(arena.device)  # a copy that has begun may still write to the arena
        del self.resident, self.backend

    def clear(self) -> None:
        """Cancel every transfer, and drop everything that the backend keeps of slots and of an
        unfinished step."""
        self.pending.clear()
        self._end_flagged()
        self.link.clear()  # also transfers that were issued and not yet noted as pending
        self.backend.clear()

    def load_all(self) -> None:
        """Load every expert, where the fast tier has room for all of them. Nothing is counted."""
        places = self.controller.cache.admit_all()
        self.issue(places, DEMAND)
        self._all_arrived(places)

    def open_pass(self, opening: Opening) -> None:
        """Issue the loads that the controller asks for before the first layer has run."""
        self.issue(self.controller.open_pass(opening), PREFETCH)

    def run(
        self, layer: MoeLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the routed experts of one layer: hidden [T, H], ids and weights [T, K] -> [T,
        H]."""
        if self._flagged:
            self._end_flagged()
        if self.is_drafting:
            return self._run_present(layer, hidden, ids, weights)
        is_token = hidden.shape[0] == 1
        if is_token and self.watcher.on_step is None:
            self.last_token[layer.index] = ids
            if self.can_skip_planning:
                if self._computes_layers:
                    out = self._forward_whole(layer.index, hidden, ids, weights)
                    if out is not None:
                        return out
                experts = ids.tolist()[0]
                if places := self.controller.fixed_places(layer.index, experts):
                    return self.backend.forward(layer.experts, hidden, experts, places, weights)
        step, plan = self._planned(layer.index, ids, weights)
        if is_token or self.watcher.decodes:
            self.last_token[layer.index] = plan
        given = layer, hidden, ids, weights
        return self._computed(plan, step.selected, step.weights, *given, rows=self.watcher.rows)

    def _run_present(
        self, layer: MoeLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Do the same as `run` with the experts that are there, for drafts."""
        selected, shares = self.watcher.chosen(ids, weights)
        self.chosen.append(selected)
        plan = self.controller.plan_present(layer.index, selected, shares, self.pending)
        return self._computed(plan, selected, shares, layer, hidden, ids, weights)

    def _computed(
        self,
        plan: Plan,
        selected: np.ndarray,
        shares: np.ndarray,
        layer: MoeLayer,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        rows: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Return what a plan gives for a layer whose router chose `selected` by `shares` [T, K]."""
        keeps_choice = plan.selected is selected
        are_planned = plan.weights is not None
        backend = self.backend.begin(
            StepTokens(
                layer.experts,
                hidden,
                experts=plan.selected
                if rows is None
                else _padded(plan.selected, rows, len(hidden)),
                ids=ids,
                router_weights=weights,
                host_weights=plan.weights if are_planned else shares,
                are_planned=are_planned,
                are_routed=keeps_choice and not are_planned,
                rows=rows,
            )
        )
        self._compute(plan, hidden.shape[0], backend)
        return backend.finish()

    def plan(self, layer: int) -> tuple[Step, Plan]:
        """Return the step of a few tokens whose letter the watcher expects, and its plan."""
        step, plan = self._planned(layer)
        if len(step.selected) == 1:
            self.last_token[layer] = plan
        return step, plan

    def begin_flagged(self, copies: FlaggedCopies) -> None:
        """Issue loads by these copies from here on, until `run` is called."""
        if self._flagged is not copies:
            self._end_flagged()
            copies.begin(self.pending.values())
            self._flagged = copies

    def _end_flagged(self) -> None:
        if self._flagged:
            self._flagged.end(self.pending.values())
            self._flagged = None

    def _planned(
        self, layer: int, ids: torch.Tensor | None = None, weights: torch.Tensor | None = None
    ) -> tuple[Step, Plan]:
        """Return a step and its plan, and tell who listens."""
        step = self.watcher.step(layer, ids, weights)
        plan = self.controller.step(step)
        if self.on_plan is not None:
            self.on_plan(step, plan)
        return step, plan

    def _forward_whole(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the output of one token where experts never leave, without asking the controller
        where they are; None where one may be absent."""
        if self.pending or not self._is_noted(layer):
            return None
        out = self.backend.forward_whole(layer, hidden, ids, weights)
        if out is None:
            del self.backend.whole[layer]  # to be noted anew once they are there
        else:
            self._count_fixed(layer, [ids])
        return out

    def _is_noted(self, layer: int) -> bool:
        """Note where a layer's experts are, unless that is done; False where the backend needs one
        that is absent."""
        backend = self.backend
        cache = self.controller.cache
        num_experts = self.controller.shape.num_experts
        if layer in backend.whole:
            return True
        if backend.needs_all and not cache.is_whole(layer):
            return False
        places = cache.places[layer * num_experts : (layer + 1) * num_experts]
        backend.note_layer(layer, [place.slot if place else NO_SLOT for place in places])
        return True

    def whole(self) -> WholeExperts | None:
        """Return the addresses of the experts of all layers, if one token can be computed without
        asking the controller; otherwise None. For a pass that drafts, those that are there."""
        if self.is_drafting:
            return self._present and self._present.whole(self.controller.cache, self.pending)
        return self.backend.all_whole if self.is_settled() else None

    @cached_property
    def _present(self) -> PresentExperts | None:
        return PresentExperts.of(self._opened, self.resident)

    def is_settled(self) -> bool:
        """Return whether one token can be computed in every layer without asking the controller."""
        can_skip = self.watcher.on_step is None and not self.pending and self.can_skip_planning
        can_skip &= not self.is_drafting
        layers = range(self.controller.shape.num_layers)
        return can_skip and self._computes_layers and all(map(self._is_noted, layers))

    def count_settled(self, chosen: Sequence[torch.Tensor]) -> None:
        """Count the use of all layers by a few tokens, whose ids [T, K] are on a device."""
        if len(chosen[0]) > 1:
            self.count(0, torch.stack(tuple(chosen)).cpu())
            return
        self.last_token.update(enumerate(chosen))
        self._count_fixed(0, chosen)

    def count(self, first: int, chosen: torch.Tensor) -> None:
        """Count the use of n layers from number `first` on by T tokens of one sequence, by the
        routers' choice in each, [n, T, K]. Those of a pass that drafts are not counted."""
        if self.is_drafting:
            self.chosen.extend(chosen.numpy().copy())
            return
        if chosen.shape[1] > 1:
            for layer, own in enumerate(chosen.numpy(), first):
                self.controller.count_fixed(layer, chosen=np.unique(own)[None])
        elif len(chosen):
            of_layers = chosen.unbind()
            self.last_token.update(enumerate(of_layers, first))
            self._count_fixed(first, of_layers)

    def _count_fixed(self, first: int, chosen: Sequence[torch.Tensor]) -> None:
        """Count one token's use of layers by their ids, [1, K] each. Ids on a device are read,
        which waits for it, only where experts are counted one by one."""
        read = torch.cat(tuple(chosen)).cpu().numpy() if self.controller.counts_chosen else None
        self.controller.count_fixed(first, len(chosen), chosen=read)

    def _compute(self, plan: Plan, num_tokens: int, backend: Backend) -> None:
        """Compute every used expert: residents first, near ones while loads are under way, arrivals
        last."""
        if plan.near:
            self.near.begin(plan.near)
        if plan.placed:
            self.issue(plan.placed, PREFETCH)
        if not plan.waves:
            self.issue(plan.prefetches, PREFETCH)
        else:
            self.issue(plan.waves[0].loads, DEMAND)
        if plan.low:
            backend.add(plan.low)
        pending = self.pending
        waves = plan.waves
        for wave, after in zip(waves, (*waves[1:], None), strict=False):
            following = {load.slot: load for load in after.loads} if after else {}
            if plan.prefetches and not after:
                self.issue(plan.prefetches, PREFETCH)
            coming = []
            ready = []
            for place in wave.resident:
                (coming if place.slot in pending else ready).append(place)
            coming += wave.loads
            if plan.near and wave is waves[0]:
                if following:
                    self._add(ready, backend, following)
                    ready = []
                backend.add_near(plan.near, self.near, ready)
                ready = []
            self._add_arrivals(coming, ready, num_tokens, backend, following)
            if following:
                self.issue(tuple(following.values()), DEMAND)
        if plan.near and not plan.waves:
            backend.add_near(plan.near, self.near, [])
        if plan.near:
            self.near.finish()

    def _add_arrivals(
        self,
        coming: list[Place],
        ready: list[Place],
        num_tokens: int,
        backend: Backend,
        following: dict[int, Place],
    ) -> None:
        """Compute the experts that are `ready`, then those `coming` as they land, all that have
        landed in one call."""
        # two calls: compute runs beside copies, and each is few kernels
        if self.link.is_queued and num_tokens == 1:
            if ready:
                self._add(ready, backend, following)
            if coming:
                self._add(self._all_arrived(coming), backend, following)
            return
        # one call for all takes less than one each beside reading threads
        if self._waits_for_all and num_tokens == 1:
            # the last lands when hardly another is under way: one wait, not one each
            for place in reversed(coming):
                self.link.collect(self.pending[place.slot])
        for place in coming:
            if ready and not self.link.has_landed(self.pending[place.slot]):
                self._add(ready, backend, following)
                ready = []
            if self._may_replace:
                place = self._landed_or_replica(place)
            else:
                self.link.collect(self.pending.pop(place.slot))
            ready.append(place)
        if ready:
            self._add(ready, backend, following)

    def _add(self, places: Sequence[Place], backend: Backend, following: dict[int, Place]) -> None:
        """Compute experts that are there; issue each load that is `following` into a slot as soon
        as that is free."""
        if not following:
            backend.add(places)
            return
        for place in places:
            backend.add([place])
            if load := following.pop(place.slot, None):
                self.issue((load,), DEMAND)

    def _landed_or_replica(self, place: Place) -> Place:
        """Return the place at which to compute an expert without waiting: its slot if it has
        landed, else the replica that stays."""
        if not self.link.has_landed(self.pending[place.slot]):
            self.num_not_landed += 1
            return Place(place.key, NO_SLOT, self.controller.cache.shadows[place.key].item())
        self.link.collect(self.pending.pop(place.slot))
        return place

    def _all_arrived(self, coming: Sequence[Place]) -> list[Place]:
        """Return the places at which to compute these experts, once they are there."""
        if self._may_replace:
            return [self._landed_or_replica(place) for place in coming]
        self.link.collect_all([self.pending.pop(place.slot) for place in coming])
        return list(coming)

    def issue(self, loads: Sequence[Place], urgency: int) -> None:
        """Issue loads into slots, after cancelling the transfers that are under way into them, if
        any."""
        if not loads:
            return
        carrier = self._flagged or self.link
        pending = self.pending
        wanted = []
        for place in loads:
            if place.slot in pending:
                carrier.cancel(pending.pop(place.slot))
            wanted.append(Wanted(place.key, self.resident.room(place), place.bits))
        transfers = carrier.issue_all(wanted, urgency=urgency)
        for place, transfer in zip(loads, transfers, strict=True):
            pending[place.slot] = transfer


def _padded(selected: np.ndarray, rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Return the plan's experts with rows for padding: [num_rows, K], -1 there."""
    full = np.full((num_rows, selected.shape[1]), -1, np.int64)
    full[rows] = selected
    return full
