"""The host road: a token is one graph, and the host decides its layers while the graph waits, by
letters and numbers in memory that both reach."""

from collections.abc import Sequence

import numpy as np
import torch

from artifacts.errors import OutOfResources
from runtime.backends.host_copy import Letter, Mailbox, page_locked
from runtime.backends.triton.triton_backend import TokenSlots
from runtime.control.plan import Place, Wave
from runtime.engine.routers import Watcher
from runtime.engine.step import StepExecutor
from runtime.kernels.load import kernels
from runtime.links.cuda_flags import FlaggedCopies
from runtime.links.link import DEMAND, PREFETCH
from runtime.model.open import MoeLayer, MoeModel

_NO_WAVE = Wave((), ())
_WORDS = 5  # of each rank in an answer
_NONE = -1


class HostRoad:
    """Queues a layer's kernels while a graph is captured, and answers them while it is replayed.

    The graph sends a layer's letter, waits for the answer, computes the experts that are there,
    waits for those that the link brings and for the outputs of those that the host computes, and
    adds all up. An answer has, for each rank, the slot of an expert that is there, the slot of one
    that is coming, the expert, its weight, and its row among the host's outputs, -1 for none; then
    the two numbers to wait for. Nothing else is launched, no event is recorded or asked.

    Slots are written without events. Whatever a plan loads goes into slots that its own step does
    not use, as the controller pins those. All steps before it have ended, since the graph sends a
    layer's letter behind the experts of the layer before, and, behind the last layer's, the letter
    that ends the token, which the host reads before anything else is loaded.
    """

    def __init__(self, opened: MoeModel, steps: StepExecutor, watcher: Watcher) -> None:
        device = opened.model.device
        shape = opened.shape
        first = opened.layers[0]
        top_k = shape.top_k
        mail = kernels("gpu.mailbox")
        self._layers = opened.layers
        self._steps = steps
        self._watcher = watcher
        self._backend = steps.backend
        self._num_experts = shape.num_experts
        self._ending = Mailbox(device)
        self._letters: list[Letter] = []
        self._num_near = 0  # steps whose experts the host has computed, by which they are numbered
        width = _WORDS * top_k + 2
        self._answer = page_locked(1 + width, torch.int32).zero_()
        self._stopped = page_locked(1, torch.int32).zero_()
        self._answer_words = words = self._answer.numpy()  # the same memory
        self._ranks = words[1 : 1 + 3 * top_k]
        self._weights = words[1 + 3 * top_k : 1 + 4 * top_k].view(np.float32)
        self._behind = words[1 + 4 * top_k :]
        self._has_stopped = self._stopped.numpy()
        self._num_numbers = mail.NUMBERS
        numbers = page_locked(mail.NUMBERS, torch.int32)
        torch.arange(mail.NUMBERS, dtype=torch.int32, out=numbers)
        self._given = torch.zeros(width, dtype=torch.int32, device=device)
        # nanoseconds that each layer waited for copies, and the number that came last
        self._told = torch.zeros(1, shape.num_layers + 1, dtype=torch.int32, device=device)
        ready, coming, keys, weights = self._given[: 4 * top_k].view(4, 1, top_k)
        self._slots = TokenSlots(ready, coming, keys, weights.view(torch.float32))
        self._wanted = self._given[4 * top_k :]
        self._copies = FlaggedCopies(steps.link, self._told[0, -1:], numbers)
        self._near = None
        if steps.controller.may_choose:
            self._token = page_locked(first.hidden_size, opened.dtype).view(1, -1)
            outputs = page_locked(top_k * first.hidden_size, opened.dtype).view(top_k, -1)
            self._near = page_locked(1, torch.int32).zero_(), outputs
            self._near_number = self._near[0].numpy()

    @staticmethod
    def suits(steps: StepExecutor) -> bool:
        """Return whether every plan for one token can be answered: all experts have one form, the
        link copies from page-locked memory, and a step's experts fit into the slots together."""
        cache = steps.controller.cache
        top_k = steps.controller.shape.top_k
        return (
            steps.link.takes_flags
            and steps.backend.has_one_form
            and min(pool.num_slots for pool in cache.pools) >= top_k
        )

    # While a graph is captured

    def rehearse(
        self, layer: MoeLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Launch the kernels of `launch` for no expert at all: they are compiled and loaded then,
        which the driver may refuse while a kernel waits. Returns zeros [1, H]."""
        none = [_NONE] * ids.shape[1]
        self._write([none, none], none, [_NONE, _NONE], none)
        out = self.launch(layer, hidden, ids, weights)
        self._letters.clear()  # the rehearsal reads none of them
        return out

    def launch(
        self, layer: MoeLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Queue a layer's kernels, which read and write at the same addresses each time: hidden [1,
        H], ids and weights [1, K] -> [1, H]."""
        mail = kernels("gpu.mailbox")
        own = {"layer": layer.index}
        if self._near:
            mail.show(hidden.contiguous(), self._token)
        self._letters.append(self._watcher.send(layer.index, ids, weights))
        mail.receive(self._answer, self._given, self._stopped, **own)

        def arrive(outputs: torch.Tensor) -> None:
            mail.arrive(self._wanted, self._told, self._stopped, y=outputs, near=self._near, **own)

        out = self._backend.forward_in_turn(hidden, self._slots, arrive)
        if layer is self._layers[-1]:
            self._letters.append(self._ending.repeated([self._told]))
        return out

    # While it is replayed

    def begin_token(self) -> None:
        """Prepare for the letters of a token, before its graph is queued."""
        self._steps.begin_flagged(self._copies)
        for letter in self._letters[-2:]:  # one of a layer, and the ending, from another memory
            letter.forget()

    def answer_all(self) -> None:
        """Decide all layers of the token whose graph is queued. Raises OutOfResources where a
        kernel waited too long."""
        *letters, ending = self._letters
        for layer, letter in zip(self._layers, letters, strict=True):
            self._wait_for(letter)
            self._watcher.expect(letter)
            with self._copies.queueing():
                self._decide(layer)
        self._wait_for(ending)
        *waited_ns, landed = ending.read()[0][0].tolist()
        self._copies.told(landed, sum(waited_ns) / 1e9)

    def stop(self) -> None:
        """Make the kernels of the token end without answers; what they compute is of no use."""
        self._has_stopped[0] = 1

    def _wait_for(self, letter: Letter) -> None:
        letter.wait(self._copies.pump)
        if stopped := self._has_stopped[0]:
            raise OutOfResources(
                f"the GPU waited a minute for experts of layer {stopped - 1}, and nothing came: "
                "run it again"
            )

    def _decide(self, layer: MoeLayer) -> None:
        steps = self._steps
        step, plan = steps.plan(layer.index)
        assert len(plan.waves) <= 1, f"layer {layer.index} loads in {len(plan.waves)} waves"
        wave = plan.waves[0] if plan.waves else _NO_WAVE
        if plan.near:
            self._backend.near.wake()
        if plan.placed:
            steps.issue(plan.placed, PREFETCH)
        # before the answer: what is there takes less time than the first of them
        if wave.loads:
            steps.issue(wave.loads, DEMAND)
        ready = {}
        coming = {}
        transfers = []
        for place in (*wave.resident, *wave.loads):
            expert = place.key % self._num_experts
            if transfer := steps.pending.pop(place.slot, None):
                coming[expert] = place.slot
                transfers.append(transfer)
            else:
                ready[expert] = place.slot
        near = {place.key % self._num_experts: row for row, place in enumerate(plan.near)}
        self._num_near += bool(near)
        experts = plan.selected[0].tolist()
        self._weights[:] = (step.weights if plan.weights is None else plan.weights)[0]
        self._write(
            [[found.get(expert, _NONE) for expert in experts] for found in (ready, coming)],
            experts,
            [self._copies.number_behind(transfers), self._num_near % self._num_numbers],
            [near.get(expert, _NONE) for expert in experts],
        )
        if plan.prefetches:
            steps.issue(plan.prefetches, PREFETCH)
        if plan.near:
            self._copies.pump_all()
            self._compute(layer, plan.near)

    def _write(
        self, slots: list[list[int]], experts: list[int], numbers: list[int], rows: list[int]
    ) -> None:
        """Write an answer but for the weights, and last the number that marks it as complete."""
        ready, coming = slots
        self._ranks[:] = ready + coming + experts
        self._behind[:] = numbers + rows
        self._answer_words[0] = 1

    def _compute(self, layer: MoeLayer, places: Sequence[Place]) -> None:
        """Compute experts on the host, and say so to the kernel that waits for their outputs."""
        steps = self._steps
        _, rows = self._near
        steps.near.begin(places)
        outputs = self._backend.near.of_token(layer.experts, places, steps.near, self._token)
        rows[: len(places)].copy_(outputs)
        steps.near.finish()
        self._near_number[0] = self._num_near % self._num_numbers
