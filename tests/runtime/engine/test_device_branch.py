"""An expert copied beside a token's kernels, missing or prefetched, is there when a layer computes with
it, in whatever order streams run."""

import json

import pytest

from tests.helpers.triton_process import interpret, needs_triton

pytestmark = [needs_triton, pytest.mark.slow]
ORDERED = """
import json, sys
from types import SimpleNamespace
import numpy as np
import pytest, torch
from triton.runtime.interpreter import GridExecutor
from artifacts.shape import FULL_BITS, Shape
from runtime.control.build import build_controller
from runtime.control.on_device import CacheOnDevice
from runtime.backends import host_copy, streams
from runtime.engine import device_road
from runtime.kernels.gpu import decide
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope
from runtime.session.settings import Settings
from tests.helpers.fake_gpu import fake_cuda
L, E, S, K, WORDS, MOST = 3, 8, 12, 2, 16, 2
shape = Shape(num_layers=L, num_experts=E, top_k=K, expert_nbytes=4 * WORDS)
patch, launch = pytest.MonkeyPatch(), GridExecutor.__call__
host_copy.has_streams = lambda device: True
without, chosen = json.loads(sys.argv[1])
prefetches = "prefetch" in chosen
if without:
    setattr(streams.Branch, without, lambda self: None)

def decode(seed):
    gpu, random = fake_cuda(patch, seed), np.random.default_rng(seed)
    patch.setattr(
        GridExecutor, "__call__", lambda *given, **own: gpu.current_stream().add(lambda: launch(*given, **own))
    )
    policies = build(Settings(policies=chosen).texts())
    own = {"num_slots": S, "scope": Scope.LAYER, "window": MOST * shape.expert_nbytes, "artefacts": Artefacts()}
    controller = build_controller(policies, shape, **own)
    host = torch.arange(L * E * WORDS, dtype=torch.int32).view(L * E, WORDS)
    arena = torch.full((S * WORDS,), -1, dtype=torch.int32)
    starts = range(0, arena.nbytes, shape.expert_nbytes)
    slots = SimpleNamespace(device=arena.device, arena=arena.view(torch.uint8), starts=starts)
    slow = SimpleNamespace(stores={FULL_BITS: SimpleNamespace(buffer=host.view(torch.uint8))})
    wrong = []

    def compute_at(starts, numbers, own):
        def compute():
            layer, ids = own
            for number, expert in zip(numbers[0].tolist(), ids[0].tolist()):
                if number >= 0:
                    begin = starts[number]
                    wrong.append(not torch.equal(arena[begin : begin + WORDS], host[layer * E + expert]))

        gpu.current_stream().add(compute)

    def forward_at(starts, numbers, own, ids, weights):
        return compute_at(starts, numbers, own)

    both = {"compute_at": compute_at, "forward_at": forward_at}
    output = SimpleNamespace(**both, starts=lambda own: torch.tensor([WORDS * slot for slot in own]))
    resident = SimpleNamespace(slots=slots, slow=slow)
    books = CacheOnDevice(controller, policies)
    road = device_road.DeviceRoad(SimpleNamespace(shape=shape), books, resident, output, lambda: None)
    for _ in range(6):
        controller.begin_pass(1)
        for layer in range(L):
            ids = torch.from_numpy(random.permutation(E)[None, :K])
            foreseen = torch.from_numpy(random.random((1, E), np.float32)) if prefetches else None
            road.forward(layer, (layer, ids), ids, None, foreseen)
        road.end_pass()
        gpu.run()  # the next token is drawn from this one's logits
    road.give_back()
    controller.validate()
    return sum(wrong), len(wrong), controller.counters.totals()

found = [decode(seed) for seed in range(4)]
print(sum(wrong for wrong, _, _ in found), min(count for _, count, _ in found) == 6 * L * K)
used = ("hits", "evictions", *["prefetch_bytes"] * prefetches)
print(all(totals[name] for _, _, totals in found for name in used))
"""
AHEAD = {"prefetch": "next_gate:least=0.2"}


@pytest.mark.parametrize("without", ["", "join", "fork"])
@pytest.mark.parametrize(
    "policies",
    [{}, AHEAD, {"eviction": "late_horizon", **AHEAD}],
    ids=["on demand", "next gate", "next gate, late horizon"],
)
def test_experts_are_there_when_they_are_used(policies: dict[str, str], without: str) -> None:
    """Four random orders. Where compute does not wait for the branch, or the branch for compute,
    some expert is read before it has come."""
    wrong, *figures = " ".join(interpret(ORDERED, json.dumps([without, policies]))).split()
    assert figures == ["True", "True"]
    assert (wrong == "0") == (not without)
