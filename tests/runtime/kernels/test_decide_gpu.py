"""The decision on the device equals that of the policy `lru`, expert by expert, and every slot holds what it should."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers.triton_process import compiled, compiler, interpret, needs_triton

pytestmark = needs_triton
DECIDED = """
import json, sys
import numpy as np
import torch
from artifacts.shape import Shape
from runtime.control.build import build_controller
from runtime.kernels.gpu import decide
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope
from runtime.policies.step import Step
from runtime.session.settings import Settings
decide._BLOCK = 64
L, E, S, K, seed = json.loads(sys.argv[1])
WORDS = 96  # of an expert; slots of all layers lie mixed in the arena
random = np.random.default_rng(seed)
shape = Shape(num_layers=L, num_experts=E, top_k=K, expert_nbytes=4 * WORDS)
own = {"num_slots": L * S, "shadows": None, "split": None, "scope": Scope.LAYER, "window": 0, "num_devices": 1}
policies = build(Settings(policies={"eviction": "lru"}).texts())
controller = build_controller(policies, shape, artefacts=Artefacts(), **own)
cache = decide.DeviceCache.empty(L, E, S, "cpu")
host = torch.arange(L * E * WORDS, dtype=torch.int32).view(L * E, WORDS)
starts = torch.from_numpy(random.permutation(L * S) * WORDS)
arena = torch.full((L * S * WORDS,), -1, dtype=torch.int32)
slots, missing = (torch.zeros(K, dtype=torch.int32) for _ in range(2))
liked, differing, wrong = random.random((L, E)) ** 3, 0, 0
for token in range(40):
    cache.clock.add_(1)
    controller.begin_pass(1)
    for layer in range(L):
        ids = random.choice(E, K, replace=False, p=liked[layer] / liked[layer].sum())
        weights = np.full((1, K), 1 / K, np.float32)
        plan = controller.step(Step(token, 1, layer, ids[None], weights, last=np.array([0])))
        decide.resolve(cache, layer, torch.from_numpy(ids), slots, missing)
        decide.fill(host, starts, arena, slots, missing, first_key=layer * E, first_slot=layer * S)
        loads = {place.key % E for wave in plan.waves for place in wave.loads}
        there = set(np.flatnonzero(controller.cache.layer_states(layer)).tolist())
        ours = {expert for expert in cache.owner[layer].tolist() if expert >= 0}
        differing += loads != {expert for expert in missing.tolist() if expert >= 0} or ours != there
        for slot, expert in zip(slots.tolist(), ids.tolist()):
            begin = starts[layer * S + slot]
            wrong += not torch.equal(arena[begin : begin + WORDS], host[layer * E + expert])
misses = controller.counters.totals()["misses"]
print(differing, wrong, int(misses == cache.num_missed.sum()), int(0 < misses < 40 * L * K))
"""


@pytest.mark.parametrize("sizes", [(2, 16, 6, 4), (1, 12, 4, 4), (2, 9, 8, 2)], ids=str)
def test_it_decides_as_lru_and_brings_what_is_missing(sizes: tuple[int, ...]) -> None:
    """Also with as many slots as a token has experts, and with slots that stay free for long."""
    assert interpret(DECIDED, json.dumps([*sizes, 0])) == ["0 0 1 1"]


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_they_compile_and_read_16_bytes_a_thread(tmp_path: Path, capability: int) -> None:
    from runtime.kernels.gpu.decide import _fill, _resolve

    names = ("table_ptr", "owner_ptr", "stamp_ptr", "clock_ptr", "num_missed_ptr", "slots_ptr", "missing_ptr")
    tensors = dict.fromkeys((*names, "host_ptr", "arena_ptr"), "*i32") | {"ids_ptr": "*i64", "starts_ptr": "*i64"}
    with compiler(tmp_path):
        assert compiled(_resolve, capability, tensors, odd=("layer",), top_k=8, width=32)["cubin"]
        ptx = compiled(_fill, capability, tensors, odd=("first_key", "first_slot"), block=4096)["ptx"]
    assert len(re.findall(r"ld\.global[.\w:]*\.v4", ptx)) == len(re.findall(r"st\.global[.\w:]*\.v4", ptx)) == 8
