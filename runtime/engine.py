"""Executes plans: transformers calls it once per MoE layer in place of the experts' own forward.

One engine owns one model while it is installed. Per pass a hook on the model says which rows are tokens and whose;
per layer a
hook on the router hands over its logits, and the registered experts function does the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from artifacts.expertmaps import mean_rows
from artifacts.replicas import FULL_BITS
from artifacts.trace import DECODE, PREFILL
from runtime.controller import Controller
from runtime.experts import assign, expert_forward, gather
from runtime.fused import Fused
from runtime.host import on_host, real_rows, to_host
from runtime.link import DEMAND, PREFETCH, Transfer
from runtime.model import MoeLayer, MoeModel
from runtime.plan import NO_SLOT, Place, Plan
from runtime.policies.base import Step, last_tokens
from runtime.predictors import Predictor
from runtime.resident import Resident
from runtime.shadows import Shadows
from runtime.slots import Slots
from runtime.stepsum import StepSum
from runtime.tiers import Tiers

NAME = "moectl"


def _experts_function(
    module: nn.Module, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What ALL_EXPERTS_FUNCTIONS calls: hidden [T, H], ids and weights [T, K] -> [T, H]."""
    return module.moectl_forward(hidden, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_function)


@dataclass(slots=True)
class _Routed:
    """What a router was given and said, kept until its experts are called."""

    x: torch.Tensor | None = None
    extra: tuple = ()
    logits: torch.Tensor | None = None


@dataclass(slots=True)
class _Pass:
    """The pass under way: its phase, which rows are tokens (None: all), whose they are, and their means."""

    phase: int
    rows: np.ndarray | None
    requests: np.ndarray
    embedding: np.ndarray | None = None  # [R, H]


class Engine:
    """Runs a model's experts by a controller's plans; `slots` are the fast tier, with the replicas `shadows` beside
    them if any stay."""

    def __init__(
        self,
        opened: MoeModel,
        controller: Controller,
        *,
        tiers: Tiers,
        slots: Slots,
        shadows: Shadows | None,
        is_fused: bool,
    ) -> None:
        self.controller, self.link, self.near = controller, tiers.link, tiers.near
        self.on_step: Callable[[Step], None] | None = None
        self.on_pass: Callable[[np.ndarray], None] | None = None
        self.on_embedding: Callable[[int, int, np.ndarray], None] | None = None
        self.stall_s: list[float] = []
        self.num_not_landed = 0
        self.first_request = 0
        self.wants_probabilities = self.wants_embeddings = False
        self.distance = 0
        self.predictor: Predictor | None = None
        self._opened, self._slow, self._shadows, self._is_fused = opened, tiers.slow, shadows, is_fused
        self._together = None if is_fused else tiers.slow.together(opened)
        self.lay_out(slots)
        self._pending: dict[int, Transfer] = {}
        self._routed = [_Routed() for _ in opened.layers]
        self._pass = _Pass(PREFILL, None, np.zeros(0, np.int32))
        self._handles: list = []
        self._is_watching = False

    def install(self) -> None:
        model = self._opened.model
        model.set_experts_implementation(NAME)
        for layer in self._opened.layers:
            layer.experts.moectl_forward = self._layer_forward(layer)
        if self.distance or self.predictor:
            self._watch_routers()
        self._handles.append(model.register_forward_pre_hook(self._begin_pass, with_kwargs=True))
        self._handles.append(model.register_forward_hook(self._end_pass))
        if self.wants_embeddings:
            self._watch_embedding()

    def see_probabilities(self) -> None:
        """Steps carry the routers' probabilities from here on."""
        self.wants_probabilities = True
        self._watch_routers()

    def see_embeddings(self) -> None:
        """Steps carry what their pass was given from here on."""
        if not self.wants_embeddings:
            self.wants_embeddings = True
            self._watch_embedding()

    def see_predictions(self, distance: int = 1, predictor: Predictor | None = None) -> None:
        """Steps carry what the routers of the next `distance` layers say of this one's input from here on, and what
        the fitted predictor says of it if there is one."""
        self.distance = max(self.distance, distance)
        self.predictor = predictor or self.predictor
        self._watch_routers()

    def uninstall(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._is_watching = False
        for layer in self._opened.layers:
            del layer.experts.moectl_forward
        self._opened.model.set_experts_implementation("eager")

    def forget(self) -> None:
        """Drop every expert from the fast tier, as after a failed step, when slots may hold anything."""
        for transfer in self._pending.values():
            self.link.cancel(transfer)
        self._pending.clear()
        self.controller.forget()

    def let_go(self) -> None:
        """Forget the slots, which others are to follow; the controller has been told. Between passes."""
        for transfer in self._pending.values():
            self.link.cancel(transfer)
        self._pending.clear()
        device = self._opened.model.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a copy that has begun may still write to what goes
        del self._resident, self._fused

    def lay_out(self, slots: Slots) -> None:
        """The fast tier is these slots from here on, and empty."""
        self._resident = Resident(self._opened, slots, self._slow, self._shadows)
        self._fused = Fused(self._opened, self._resident) if self._is_fused else None

    # Hooks

    def _begin_pass(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        batch, length = (ids if ids is not None else kwargs["inputs_embeds"]).shape[:2]
        requests = np.arange(self.first_request, self.first_request + batch, dtype=np.int32).repeat(length)
        rows = real_rows(kwargs.get("attention_mask"), batch, length)
        requests = requests if rows is None else requests[rows]
        self._pass = _Pass(PREFILL if length > 1 else DECODE, rows, requests)
        self.controller.begin_pass(len(requests))
        if self.on_pass is not None:
            self.on_pass(requests)
        if self.wants_embeddings and ids is None:
            self._embed(kwargs["inputs_embeds"])

    def _end_pass(self, model: nn.Module, args: tuple, output: object) -> None:
        self.stall_s.append(self.link.drain_stalls())

    def _watch_routers(self) -> None:
        """Only where somebody asks: a hook costs a layer of one token some five microseconds."""
        if not self._is_watching:
            self._is_watching = True
            for layer in self._opened.layers:
                self._handles.append(layer.gate.register_forward_hook(self._keep_routing(layer.index)))

    def _watch_embedding(self) -> None:
        def embed(embedding: nn.Module, args: tuple, output: torch.Tensor) -> None:
            self._embed(output)

        self._handles.append(self._opened.model.get_input_embeddings().register_forward_hook(embed))

    def _embed(self, given: torch.Tensor) -> None:
        """What the pass was given [B, S, H] crosses by itself, as soon as it is there: whoever searches by it does so
        while the first layer attends."""
        tokens = given.detach().flatten(0, -2).float().cpu().numpy()
        tokens = tokens if self._pass.rows is None else tokens[self._pass.rows]
        self._pass.embedding = np.array(mean_rows(tokens, last_tokens(self._pass.requests)))
        if self.on_embedding is not None:
            self.on_embedding(self.controller.now.pass_index, self._pass.phase, self._pass.embedding)

    def _keep_routing(self, index: int) -> Callable:
        routed = self._routed[index]

        def hook(gate: nn.Module, args: tuple, output: tuple) -> None:
            routed.x, routed.extra, routed.logits = args[0], args[1:], output[0]

        return hook

    # One step

    def _layer_forward(self, layer: MoeLayer) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        def forward(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            try:
                return self._step(layer, hidden, ids, weights)
            except BaseException:
                self.forget()
                raise

        return forward

    def _step(self, layer: MoeLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.controller.holds_all and len(hidden) == 1 and self.on_step is None:
            experts = ids.tolist()[0]
            if slots := self.controller.settled(layer.index, experts):
                return self._decode(layer, hidden, experts, slots, weights)
        step = self._observe(layer.index, ids, weights)
        if self.on_step is not None:
            self.on_step(step)
        plan = self.controller.step(step)
        output = self._output(layer, hidden, plan, step, weights)
        self._compute(layer, plan, hidden, output)
        return output.finish()

    def _output(
        self, layer: MoeLayer, hidden: torch.Tensor, plan: Plan, step: Step, weights: torch.Tensor
    ) -> StepSum | Fused:
        """What takes the step's experts as they are computed."""
        if self._fused and len(hidden) == 1:
            own = step.weights if plan.weights is None else plan.weights
            self._fused.begin(layer.experts, hidden, plan.selected[0].tolist(), own[0])
            return self._fused
        if plan.weights is not None:
            weights = self._reweighted(plan.weights, weights)
        assigned = assign(self._all_rows(plan.selected, len(hidden)), hidden.device)
        return StepSum(layer.experts, self._resident, self._together, hidden=hidden, assigned=assigned, weights=weights)

    def _decode(
        self, layer: MoeLayer, hidden: torch.Tensor, experts: list[int], slots: list[int], weights: torch.Tensor
    ) -> torch.Tensor:
        """One token whose experts lie in `slots`, all there: [1, H]. A call more takes as long as a small expert."""
        if self._fused:
            return self._fused.forward(hidden, experts, slots, weights)
        views = [self._resident.whole(slot) for slot in slots]
        if self._together:
            y = self._together.forward(layer.experts, views, hidden)
        else:
            y = torch.stack([expert_forward(layer.experts, own, hidden) for own in views])
        shares = (y * weights.reshape(-1, 1, 1)).to(hidden.dtype).unbind()
        first, *others = sorted(range(len(experts)), key=experts.__getitem__)
        out = shares[first]  # a sum that starts from zeros, as eager's, would differ in the sign of a zero alone
        for rank in others:
            out += shares[rank]
        return out

    def _compute(self, layer: MoeLayer, plan: Plan, hidden: torch.Tensor, output: StepSum | Fused) -> None:
        """Every used expert: residents first, near ones while loads are under way, arrivals last."""
        self.near.begin(plan.near)
        if not plan.waves:
            self._issue(plan.prefetches, PREFETCH)
        if plan.low:
            output.add(plan.low)
        for wave in plan.waves:
            self._issue(wave.loads, DEMAND)
            if wave is plan.waves[-1]:
                self._issue(plan.prefetches, PREFETCH)
            ready = [place for place in wave.resident if place.slot not in self._pending]
            if plan.near and wave is plan.waves[0]:
                output.add(ready)
                self._compute_near(layer, plan.near, hidden, output)
                ready = []
            self._add_arrivals(
                [place for place in (*wave.resident, *wave.loads) if place.slot in self._pending], ready, output
            )
        if not plan.waves:
            self._compute_near(layer, plan.near, hidden, output)
        self.near.finish()

    def _add_arrivals(self, coming: list[Place], ready: list[Place], output: StepSum | Fused) -> None:
        """Compute what is `ready`, then the others as they land; what has landed by then in one go with it."""
        for place in coming:
            if ready and not self.link.has_landed(self._pending[place.slot]):
                output.add(ready)
                ready = []
            ready.append(self._arrived(place))
        if ready:
            output.add(ready)

    def _arrived(self, place: Place) -> Place:
        """Where to compute an expert: in its slot once it is there, or on the replica that stays rather than wait."""
        if self._shadows and not self.link.has_landed(self._pending[place.slot]):
            self.num_not_landed += 1
            return Place(place.key, NO_SLOT, int(self.controller.cache.shadows[place.key]))
        self.link.collect(self._pending.pop(place.slot))
        return place

    def _compute_near(
        self, layer: MoeLayer, places: tuple[Place, ...], hidden: torch.Tensor, output: StepSum | Fused
    ) -> None:
        """Add what is computed near."""
        host = hidden.cpu() if places else hidden
        for place in places:
            if isinstance(output, Fused) and place.bits == FULL_BITS:
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

    # Between device and host

    def _observe(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> Step:
        """The step as policies see it. What they need of it crosses to the host here and nowhere else."""
        routed = self._routed[layer]
        tensors = [ids, weights.float()]
        if self.wants_probabilities:
            tensors.append(routed.logits.float().softmax(-1))
        tensors += self._predictions(layer, routed)
        if self.predictor:
            tensors += self.predictor.ahead(layer, routed.x)
        arrays = to_host(tensors)
        if self._pass.rows is not None:
            arrays = [array[self._pass.rows] for array in arrays]
        selected, weights_host, *rest = arrays
        probabilities = rest.pop(0) if self.wants_probabilities else None
        predicted, learned = (_stacked(part) for part in (rest[: self.distance], rest[self.distance :]))
        return Step(
            pass_index=self.controller.now.pass_index,
            phase=self._pass.phase,
            layer=layer,
            selected=selected,
            weights=weights_host,
            probabilities=probabilities,
            predicted=predicted,
            last=last_tokens(self._pass.requests),
            learned=learned,
            embedding=self._pass.embedding,
        )

    def _predictions(self, layer: int, routed: _Routed) -> list[torch.Tensor]:
        """[T, E] of each of the next D routers on this router's input."""
        layers = self._opened.layers
        predicted = []
        for distance in range(1, self.distance + 1):
            ahead = layers[(layer + distance) % len(layers)]
            extra = self._routed[ahead.index].extra
            logits = type(ahead.gate).forward(ahead.gate, routed.x, *extra)[0]  # past the hook, which would keep it
            predicted.append(logits.float().softmax(-1))
        return predicted

    def _all_rows(self, selected: np.ndarray, num_rows: int) -> np.ndarray:
        """[rows, K]: padding rows have no expert."""
        if self._pass.rows is None:
            return selected
        full = np.full((num_rows, selected.shape[1]), -1, np.int64)
        full[self._pass.rows] = selected
        return full

    def _reweighted(self, new: np.ndarray, weights: torch.Tensor) -> torch.Tensor:
        full = torch.from_numpy(np.ascontiguousarray(new)).to(weights)
        if self._pass.rows is None:
            return full
        rows = torch.from_numpy(self._pass.rows).to(weights.device)
        return torch.zeros_like(weights).index_copy_(0, rows, full)


def _stacked(ahead: list[np.ndarray]) -> np.ndarray | None:
    """[T, D, E]."""
    if len(ahead) == 1:
        return ahead[0][:, None]
    return np.stack(ahead, axis=1) if ahead else None
