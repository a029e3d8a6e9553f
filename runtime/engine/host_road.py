"""The host road: a pass of one token, or a few, is one graph, and the host decides its layers while
the graph waits, by letters and numbers in memory that both reach."""

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
    """What graphs of any number of tokens share that the host answers: copies, and numbers that
    both reach. `desk` has the rest.

    Slots are written without events. Whatever a plan loads goes into slots that its own step does
    not use, as the controller pins those. All steps before it have ended, since the graph sends a
    layer's letter behind the experts of the layer before, and, behind the last layer's, the letter
    that ends the pass, which the host reads before anything else is loaded.
    """

    def __init__(self, opened: MoeModel, steps: StepExecutor, watcher: Watcher) -> None:
        device = opened.model.device
        mail = kernels("gpu.mailbox")
        self.opened = opened
        self.steps = steps
        self.watcher = watcher
        self.ending = Mailbox(device)
        self.num_near = 0  # steps whose experts the host has computed, by which they are numbered
        self.num_numbers = mail.NUMBERS
        self.stopped = page_locked(1, torch.int32).zero_()
        self.has_stopped = self.stopped.numpy()  # the same memory
        numbers = page_locked(mail.NUMBERS, torch.int32)
        torch.arange(mail.NUMBERS, dtype=torch.int32, out=numbers)
        # nanoseconds that each layer waited for copies, and the number that came last
        self.told = torch.zeros(1, opened.shape.num_layers + 1, dtype=torch.int32, device=device)
        self.copies = FlaggedCopies(steps.link, self.told[0, -1:], numbers)
        self.near = None
        if steps.controller.may_choose:
            self.near = page_locked(1, torch.int32).zero_()  # the number of what was computed last

    @staticmethod
    def suits(steps: StepExecutor, num_tokens: int = 1) -> bool:
        """Return whether every plan for that many tokens can be answered: all experts have one
        form, the link copies from page-locked memory, and a step's experts fit into the slots
        together."""
        cache = steps.controller.cache
        shape = steps.controller.shape
        return (
            steps.link.takes_flags
            and steps.backend.has_one_form
            and min(pool.num_slots for pool in cache.pools)
            >= min(num_tokens * shape.top_k, shape.num_experts)
        )

    def desk(self, num_tokens: int) -> "HostDesk":
        """Return what answers a graph of that many tokens."""
        return HostDesk(self, num_tokens)

    def stop(self) -> None:
        """Make the kernels of the pass end without answers; what they compute is of no use."""
        self.has_stopped[0] = 1

    def wait_for(self, letter: Letter) -> None:
        """Wait for a letter, and hand over prefetches meanwhile. Raises OutOfResources where a
        kernel waited too long."""
        letter.wait(self.copies.pump)
        if stopped := self.has_stopped[0]:
            raise OutOfResources(
                f"the GPU waited a minute for experts of layer {stopped - 1}, and nothing came: "
                "run it again"
            )


class HostDesk:
    """Queues a layer's kernels for T tokens while a graph is captured, and answers them while it is
    replayed.

    The graph sends a layer's letter, waits for the answer, computes the experts that are there,
    waits for those that the link brings and for the outputs of those that the host computes, and
    adds all up. An answer has, for each rank of each token, the slot of an expert that is there,
    the slot of one that is coming, the expert, its weight, and its row among the host's outputs, -1
    for none; then the two numbers to wait for. Nothing else is launched, no event is recorded or
    asked.
    """

    def __init__(self, road: HostRoad, num_tokens: int) -> None:
        opened = road.opened
        first = opened.layers[0]
        device = opened.model.device
        top_k = opened.shape.top_k
        count = num_tokens * top_k
        self.road = road
        self._steps = road.steps
        self._layers = opened.layers
        self._backend = road.steps.backend
        self._num_experts = opened.shape.num_experts
        self._letters: list[Letter] = []
        width = _WORDS * count + 2
        self._answer = page_locked(1 + width, torch.int32).zero_()
        self._answer_words = words = self._answer.numpy()  # the same memory
        self._ranks = words[1 : 1 + 3 * count]
        self._weights = words[1 + 3 * count : 1 + 4 * count].view(np.float32)
        self._behind = words[1 + 4 * count :]
        self._given = torch.zeros(width, dtype=torch.int32, device=device)
        ready, coming, keys, weights = self._given[: 4 * count].view(4, num_tokens, top_k)
        self._slots = TokenSlots(ready, coming, keys, weights.view(torch.float32))
        self._wanted = self._given[4 * count :]
        self._near = None
        if road.near is not None:
            tokens = page_locked(num_tokens * first.hidden_size, opened.dtype)
            self._tokens = tokens.view(num_tokens, -1)
            outputs = page_locked(count * first.hidden_size, opened.dtype).view(count, -1)
            self._near = road.near, outputs
            self._near_number = road.near.numpy()

    # While a graph is captured

    def rehearse(
        self, layer: MoeLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Launch the kernels of `launch` for no expert at all: they are compiled and loaded then,
        which the driver may refuse while a kernel waits. Returns zeros [T, H]."""
        none = [_NONE] * ids.numel()
        self._write([none, none], none, [_NONE, _NONE], none)
        out = self.launch(layer, hidden, ids, weights)
        self._letters.clear()  # the rehearsal reads none of them
        return out

    def launch(
        self, layer: MoeLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Queue a layer's kernels, which read and write at the same addresses each time: hidden [T,
        H], ids and weights [T, K] -> [T, H]."""
        road = self.road
        mail = kernels("gpu.mailbox")
        own = {"layer": layer.index}
        if self._near:
            mail.show(hidden.contiguous(), self._tokens)
        self._letters.append(road.watcher.send(layer.index, ids, weights))
        mail.receive(self._answer, self._given, road.stopped, **own)

        def arrive(outputs: torch.Tensor) -> None:
            mail.arrive(self._wanted, road.told, road.stopped, y=outputs, near=self._near, **own)

        out = self._backend.forward_in_turn(hidden, self._slots, arrive)
        if layer is self._layers[-1]:
            self._letters.append(road.ending.repeated([road.told]))
        return out

    # While it is replayed

    def begin_pass(self) -> None:
        """Prepare for the letters of a pass, before its graph is queued."""
        self._steps.begin_flagged(self.road.copies)
        for letter in self._letters[-2:]:  # one of a layer, and the ending, from another memory
            letter.forget()

    def answer_all(self) -> None:
        """Decide all layers of the pass whose graph is queued. Raises OutOfResources where a kernel
        waited too long."""
        road = self.road
        *letters, ending = self._letters
        for layer, letter in zip(self._layers, letters, strict=True):
            road.wait_for(letter)
            road.watcher.expect(letter)
            with road.copies.queueing():
                self._decide(layer)
        road.wait_for(ending)
        *waited_ns, landed = ending.read()[0][0].tolist()
        road.copies.told(landed, sum(waited_ns) / 1e9)

    def _decide(self, layer: MoeLayer) -> None:
        road = self.road
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
        road.num_near += bool(plan.near)
        experts = plan.selected.ravel().tolist()
        self._weights[:] = (step.weights if plan.weights is None else plan.weights).ravel()
        self._write(
            [[found.get(expert, _NONE) for expert in experts] for found in (ready, coming)],
            experts,
            [road.copies.number_behind(transfers), road.num_near % road.num_numbers],
            self._near_rows(plan.near, plan.selected),
        )
        if plan.prefetches:
            steps.issue(plan.prefetches, PREFETCH)
        if plan.near:
            road.copies.pump_all()
            self._compute(layer, plan.near, plan.selected)

    def _near_rows(self, places: Sequence[Place], experts: np.ndarray) -> list[int]:
        """Return the row of each rank's output, of tokens that go to `experts` [T, K], among those
        that `NearExperts.of_few` gives."""
        if not places:
            return [_NONE] * experts.size
        near = [place.key % self._num_experts for place in places]
        by_rank = experts.T.ravel().tolist()
        order = [i for own in near for i, expert in enumerate(by_rank) if expert == own]
        rows = np.full(experts.T.shape, _NONE)
        np.put(rows, order, np.arange(len(order)))
        return rows.T.ravel().tolist()

    def _write(
        self, slots: list[list[int]], experts: list[int], numbers: list[int], rows: list[int]
    ) -> None:
        """Write an answer but for the weights, and last the number that marks it as complete."""
        ready, coming = slots
        self._ranks[:] = ready + coming + experts
        self._behind[:] = numbers + rows
        self._answer_words[0] = 1

    def _compute(self, layer: MoeLayer, places: Sequence[Place], experts: np.ndarray) -> None:
        """Compute experts on the host, and say so to the kernel that waits for their outputs."""
        near = self._steps.near
        _, rows = self._near
        near.begin(places)
        outputs = self._backend.near.of_few(layer.experts, places, near, self._tokens, experts)
        rows[: len(outputs)].copy_(outputs)
        near.finish()
        self._near_number[0] = self.road.num_near % self.road.num_numbers
