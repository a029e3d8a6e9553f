"""The decision on the device equals that of the policies `lru` and `lfu`, expert by expert, and every slot holds what
it should."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers.triton_process import compiled, compiler, interpret, needs_triton

pytestmark = needs_triton
DECIDED = """
import json, sys
from dataclasses import astuple
import numpy as np
import torch
from artifacts.shape import Shape
from runtime.control.build import build_controller
from runtime.control.on_device import CacheOnDevice
from runtime.kernels.gpu import decide
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope
from runtime.policies.step import Step
from runtime.session.settings import Settings
decide._BLOCK = 64
L, E, S, K, eviction = json.loads(sys.argv[1])
WORDS = 96  # of an expert; slots of all layers lie mixed in the arena
random = np.random.default_rng(0)
shape = Shape(num_layers=L, num_experts=E, top_k=K, expert_nbytes=4 * WORDS)
own = {"num_slots": S, "shadows": None, "split": None, "scope": Scope.LAYER, "window": 0, "num_devices": 1}

def controlled():
    policies = build(Settings(policies={"eviction": eviction}).texts())
    return build_controller(policies, shape, artefacts=Artefacts(), **own), policies.eviction

(controller, its), (live, ours) = controlled(), controlled()
books = CacheOnDevice(live, ours)
host = torch.arange(L * E * WORDS, dtype=torch.int32).view(L * E, WORDS)
starts = torch.from_numpy(random.permutation(S) * WORDS)
arena = torch.full((S * WORDS,), -1, dtype=torch.int32)
slots, missing = (torch.zeros(K, dtype=torch.int32) for _ in range(2))
liked, differing, wrong = random.random((L, E)) ** 3, 0, 0
for turn in range(40):
    is_host, num_tokens = turn % 10 < 3, 3 if turn % 10 < 2 else 1  # the host has every tenth prompt, and a token
    if turn % 10 == 3:
        own_tables = map(torch.from_numpy, astuple(books.hand_over()))
        uses = {"counts_uses": books.counts_uses}
        cache = decide.DeviceCache.holding(*own_tables, books.num_slots, **uses)
    elif turn % 10 == 0 and turn:
        books.take_back(cache.owner.numpy(), cache.stamp.numpy())
        live.validate()
        for place in filter(None, live.cache.places):  # bytes do not move
            wrong += arena[starts[place.slot]] != host[place.key, 0]
    for one in (controller, live):
        one.begin_pass(num_tokens)
    if not is_host:
        before = cache.counts.clone()
        cache.clock.fill_(books.clock())
    for layer in range(L):
        chances = liked[layer] / liked[layer].sum()
        ids = np.stack([random.choice(E, K, replace=False, p=chances) for _ in range(num_tokens)])
        weights = np.full((num_tokens, K), 1 / K, np.float32)
        step = Step(turn, 1, layer, ids, weights, last=np.array([num_tokens - 1]))
        plan = controller.step(step)
        if is_host:
            for load in (load for wave in live.step(step).waves for load in wave.loads):
                arena[starts[load.slot] :][:WORDS] = host[load.key]
            continue
        books.stepped(layer)
        first = {"first_key": layer * E, "first_slot": books.first_slots[layer]}
        decide.resolve(cache, layer, torch.from_numpy(ids[0]), slots, missing)
        decide.fill(host, starts, arena, slots, missing, **first)
        loads = {place.key % E for wave in plan.waves for place in wave.loads}
        differing += loads != {expert for expert in missing.tolist() if expert >= 0}
        for slot, expert in zip(slots.tolist(), ids[0].tolist()):
            begin = starts[first["first_slot"] + slot]
            wrong += not torch.equal(arena[begin : begin + WORDS], host[layer * E + expert])
    if not is_host:
        books.count(books.counters.table, *(cache.counts - before).numpy())
books.take_back(cache.owner.numpy(), cache.stamp.numpy())
differing += any((one != other).any() for one, other in zip(live.counters.passes, controller.counters.passes))
there = controller.cache.state == 2
differing += (live.cache.state != controller.cache.state).any() or live.now != controller.now
if eviction == "lru":
    differing += (ours.last_use[there] != its.last_use[there]).any()
else:
    differing += (ours.uses != its.uses).any()
totals = controller.counters.totals()
print(int(differing), int(wrong), int(0 < totals["evictions"] < totals["misses"] < totals["requests"]))
"""


@pytest.mark.parametrize("sizes", [(2, 16, 13, 4), (1, 12, 4, 4), (3, 9, 14, 2)], ids=str)
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_it_decides_as_the_policy_and_brings_what_is_missing(sizes: tuple[int, ...], eviction: str) -> None:
    """Loads, counters and last uses, or numbers of uses, are those of the controller, also where the host decides
    prompts between; with as many slots as a token has experts, with layers of different sizes, and with slots that stay
    free for long."""
    assert interpret(DECIDED, json.dumps([*sizes, eviction])) == ["0 0 1"]


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_they_compile_and_read_16_bytes_a_thread(tmp_path: Path, capability: int) -> None:
    from runtime.kernels.gpu.decide import _fill, _resolve

    names = ("table_ptr", "owner_ptr", "stamp_ptr", "clock_ptr", "counts_ptr", "slots_ptr", "missing_ptr")
    tensors = dict.fromkeys((*names, "host_ptr", "arena_ptr"), "*i32") | {"ids_ptr": "*i64", "starts_ptr": "*i64"}
    with compiler(tmp_path):
        for counts_uses in (False, True):
            own = {"top_k": 8, "width": 32, "counts_uses": counts_uses}
            assert compiled(_resolve, capability, tensors, odd=("layer",), **own)["cubin"]
        ptx = compiled(_fill, capability, tensors, odd=("first_key", "first_slot"), block=4096)["ptx"]
    assert len(re.findall(r"ld\.global[.\w:]*\.v4", ptx)) == len(re.findall(r"st\.global[.\w:]*\.v4", ptx)) == 8
