"""The decision on the device equals that of the policies, expert by expert, and every slot holds
what it should."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers.triton_process import compiled, compiler, interpret, needs_triton

pytestmark = [needs_triton, pytest.mark.slow]
DECIDED = """
import json, sys
from dataclasses import astuple
import numpy as np
import torch
from artifacts.shape import Shape
from runtime.control.build import build_controller
from runtime.control.on_device import TURNS, CacheOnDevice
from runtime.kernels.gpu import decide
from runtime.kernels.gpu.device_cache import AHEAD, ON_DEMAND, DeviceCache
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope
from runtime.policies.step import Step
from runtime.session.settings import Settings
decide._BLOCK, decide._PROGRAMS = 16, 2
L, E, S, K, eviction, most, least = json.loads(sys.argv[1])
WORDS = 96  # of an expert; slots of all layers lie mixed in the arena
random = np.random.default_rng(0)
shape = Shape(num_layers=L, num_experts=E, top_k=K, expert_nbytes=4 * WORDS)
own = {"num_slots": S, "shadows": None, "split": None, "scope": Scope.LAYER, "num_devices": 1}
own["window"] = most * shape.expert_nbytes
chosen = {"eviction": eviction} | ({"prefetch": f"next_gate:overfetch=1.5,least={least}"} if most else {})

def controlled():
    policies = build(Settings(policies=chosen).texts())
    return build_controller(policies, shape, artefacts=Artefacts(), **own), policies

(controller, its), (live, ours) = controlled(), controlled()
books = CacheOnDevice(live, ours)
learns, num_counts = books.kind == TURNS, AHEAD if most else ON_DEMAND
host = torch.arange(L * E * WORDS, dtype=torch.int32).view(L * E, WORDS)
starts = torch.from_numpy(random.permutation(S) * WORDS)
arena = torch.full((S * WORDS,), -1, dtype=torch.int32)
hits, arrivals, missing = torch.zeros(3, K, dtype=torch.int32)
slots_ahead, missing_ahead = torch.zeros(2, books.num_named, dtype=torch.int32)
liked, differing, wrong = random.random((L, E)) ** 3, 0, 0

def fill(layer, slots, missing):
    first = {"first_key": layer * E, "first_slot": books.first_slots[layer]}
    decide.fill(host, starts, arena, slots, missing, **first)

def count_wrong(layer, slots, ids):
    # Of how many experts the bytes are not in their slots. Slots below 0 are none.
    places = [(starts[books.first_slots[layer] + slot], slot) for slot in slots.tolist()]
    there = [(begin, expert) for (begin, slot), expert in zip(places, ids.tolist()) if slot >= 0]
    return sum(not torch.equal(arena[begin : begin + WORDS], host[layer * E + expert]) for begin, expert in there)

def sent(missing):
    return [expert for expert in missing.tolist() if expert >= 0]

def counts():
    return cache.told[: num_counts * L].view(num_counts, L).clone()

for turn in range(30):
    is_host, num_tokens = turn % 10 < 3, 3 if turn % 10 < 2 else 1  # the host has every tenth prompt, and a token
    if turn % 10 == 0 and turn:
        books.take_back(*(one.numpy() for one in cache.kept()))
        live.validate()
        for place in filter(None, live.cache.places):  # bytes do not move
            wrong += arena[starts[place.slot]] != host[place.key, 0]
    for one in (controller, live):
        one.begin_pass(num_tokens)
    if turn % 10 == 3:
        tables = map(torch.from_numpy, astuple(books.hand_over()))
        more = {"kind": books.kind, "num_told": num_counts + K * learns}
        cache = DeviceCache.holding(*tables, num_slots=books.num_slots, **more)
    elif learns and not is_host:
        cache.stamp.copy_(torch.from_numpy(books.turns()))
    if not is_host:
        before = counts()
        cache.clock.fill_(books.clock())
    for layer in range(L):
        chances = liked[layer] / liked[layer].sum()
        ids = np.stack([random.choice(E, K, replace=False, p=chances) for _ in range(num_tokens)])
        weights = np.full((num_tokens, K), 1 / K, np.float32)
        p = np.round(10 * random.random((num_tokens, 1, E)) * liked[(layer + 1) % L]) * 0.07  # many are equal
        p = p.astype(np.float32)
        step = Step(turn, 1, layer, ids, weights, predicted=p if most else None, last=np.array([num_tokens - 1]))
        plan = controller.step(step)
        if is_host:
            plan = live.step(step)
            for load in (*(load for wave in plan.waves for load in wave.loads), *plan.prefetches):
                arena[starts[load.slot] :][:WORDS] = host[load.key]
            continue
        books.stepped(layer)
        is_new = cache.unused[layer, torch.from_numpy(ids[0])] != 0  # prefetched, and not used yet
        decide.resolve(cache, layer, torch.from_numpy(ids[0]), hits, arrivals, missing, is_ahead=bool(most))
        wrong += count_wrong(layer, hits, ids[0])  # before the others have come
        differing += int(((hits < 0) == (arrivals < 0)).sum() + ((arrivals >= 0) != ((missing >= 0) | is_new)).sum())
        fill(layer, arrivals, missing)
        loads = {place.key % E for wave in plan.waves for place in wave.loads}
        differing += loads != set(sent(missing))
        wrong += count_wrong(layer, arrivals, ids[0])
        if most:
            own_most = {"most": books.most_ahead, "least": books.least_p}
            decide.resolve_ahead(cache, layer, torch.from_numpy(p[0]), slots_ahead, missing_ahead, **own_most)
            fill((layer + 1) % L, slots_ahead, missing_ahead)
            differing += [place.key % E for place in plan.prefetches] != sent(missing_ahead)
    if not is_host:
        token = books.ended()
        *moved, wanted = (counts() - before).numpy()
        books.count(token, *moved, wanted=wanted)
        if learns:
            books.learn(token, cache.told[num_counts * L :].view(L, K).numpy())
books.take_back(*(one.numpy() for one in cache.kept()))
differing += any((one != other).any() for one, other in zip(live.counters.passes, controller.counters.passes))
differing += (live.cache.state != controller.cache.state).any() or live.now != controller.now
differing += live.mover.unused != controller.mover.unused
if eviction == "lru":
    differing += (ours.eviction.last_use != its.eviction.last_use).any()
elif eviction == "lfu":
    differing += (ours.eviction.uses != its.eviction.uses).any()
totals = controller.counters.totals()
if most:
    assert totals["collisions"] and totals["wasted_bytes"] and totals["prefetch_bytes"], totals
print(int(differing), int(wrong), int(0 < totals["evictions"] and 0 < totals["misses"] < totals["requests"]))
"""


@pytest.mark.parametrize("sizes", [(2, 16, 13, 4), (1, 12, 4, 4), (3, 9, 14, 2)], ids=str)
@pytest.mark.parametrize("eviction", ["lru", "lfu", "late_horizon"])
def test_it_decides_as_the_policy_and_brings_what_is_missing(
    sizes: tuple[int, ...], eviction: str
) -> None:
    """Loads, counters and last uses, or numbers of uses, are those of the controller, also where
    the host decides prompts between; with as many slots as a token has experts, with layers of
    different sizes, and with slots that stay free for long."""
    assert interpret(DECIDED, json.dumps([*sizes, eviction, 0, 0])) == ["0 0 1"]


@pytest.mark.parametrize(
    ("sizes", "most", "eviction", "least"),
    [
        ((2, 16, 13, 4), 2, "lru", 0),
        ((3, 9, 14, 2), 1, "lfu", 0),
        ((3, 9, 8, 2), 4, "lru", 0.21),
        ((2, 16, 13, 4), 4, "late_horizon", 0.21),
        ((3, 9, 8, 2), 4, "late_horizon", 0),
    ],
    ids=str,
)
def test_it_prefetches_as_the_policy_does(
    sizes: tuple[int, ...], most: int, eviction: str, least: float
) -> None:
    """What is sent for, in its order, wasted bytes and collisions too; where a layer has no slot
    for all that is named, where a step has bytes for fewer or for more, and where probabilities are
    those from which on experts are named: a float32 which is below the number of the policy."""
    assert interpret(DECIDED, json.dumps([*sizes, eviction, most, least])) == ["0 0 1"]


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_they_compile_and_read_16_bytes_a_thread(tmp_path: Path, capability: int) -> None:
    from runtime.kernels.gpu.decide import _BLOCK, _PROGRAMS, _fill, _resolve, _resolve_ahead

    names = (
        "table",
        "owner",
        "stamp",
        "unused",
        "left",
        "clock",
        "told",
        "slots",
        "hits",
        "arrivals",
        "missing",
        "host",
        "arena",
    )
    tensors = dict.fromkeys((f"{name}_ptr" for name in names), "*i32")
    tensors |= {"ids_ptr": "*i64", "starts_ptr": "*i64", "p_ptr": "*fp32"}
    with compiler(tmp_path):
        kinds = (
            ("last use", True, 1),
            ("uses", False, 1),
            ("turns", False, 1),
            ("last use", False, 4),
        )
        for kind, is_ahead, num_tokens in kinds:
            own = {"num_pairs": 8 * num_tokens, "top_k": 8, "width": 32}
            own |= {"kind": kind, "is_ahead": is_ahead}
            assert compiled(_resolve, capability, tensors, odd=("layer",), **own)["cubin"]
        own = {"num_named": 8, "least": 0.05, "width": 32, "num_p": 128, "block": 8}
        assert compiled(_resolve_ahead, capability, tensors, odd=("layer", "target"), **own)[
            "cubin"
        ]
        own = {"num_ranks": 8, "width": 8, "programs": _PROGRAMS, "turns": 48, "block": _BLOCK}
        ptx = compiled(_fill, capability, tensors, odd=("first_key", "first_slot"), **own)["ptx"]
        in_order = re.findall(r"(ld|st)\.global[.\w:]*\.v4", ptx)
        # of the first words, of the next ones before each are stored, and of the last ones
        assert in_order == [*8 * ["ld"], *8 * ["ld"], *8 * ["st"], *8 * ["st"]]
