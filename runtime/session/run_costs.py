"""Costs of a run, measured in a moment when it opens, as the run will compute: for the choice of
its preset."""

import math
import statistics
from dataclasses import replace
from functools import partial

import torch

from artifacts.common.host_memory import host_memory
from artifacts.hardware.costs import Costs, Work
from runtime import devices
from runtime.backends.choose import choose_backend
from runtime.kernels.cpu.threads import KernelThreads
from runtime.links.choose import default_kind
from runtime.model.layout import aligned
from runtime.model.open import MoeModel
from runtime.policies.presets import CANDIDATES, preset
from runtime.replay.candidates import RoadCosts
from runtime.session.build import open_decoder
from runtime.session.link_choice import resolve_link
from runtime.session.probe import expert_seconds, rest_seconds, seconds_of
from runtime.session.settings import EXACT, HOST, Settings
from runtime.tiers.open import LinkChoice

# Seconds of a layer beyond link and kernels on an H100 with 16 cores (docs/lab/gpu.md): where the
# device decides, where the host does, what is added where the host prefetches, where misses are
# computed near, and where the host orders evictions by what was seen.
DEVICE_LAYER_S = 0.04e-3
HOST_LAYER_S = 0.12e-3
HOST_AHEAD_S = 0.25e-3
NEAR_STEP_S = 0.4e-3
ORDER_S = 0.04e-3
_READ_NBYTES = 128 << 20
_TURNS = 4


def road_costs(opened: MoeModel, settings: Settings) -> RoadCosts:
    """Measure what a run by these settings costs. Raises BadUsage as `resolve_link` does."""
    device = opened.model.device
    fused = choose_backend(opened, num_devices=settings.devices)
    is_fused = settings.experts != EXACT and fused is not None
    link = resolve_link(
        opened,
        link=settings.link,
        near=settings.near,
        scaled_to=settings.scaled_to,
        is_fused=is_fused,
    )
    costs = measured_costs(opened, link, is_fused=is_fused)
    may_decide = (
        settings.decide != HOST and link.kind == "cuda" and is_fused and fused.needs_no_host
    )
    return roads_of(
        costs,
        has_graphs=is_fused and devices.has_graphs(device),
        by_device=by_device(settings) if may_decide else frozenset(),
    )


def roads_of(
    costs: Costs, *, has_graphs: bool, by_device: frozenset[str] = frozenset()
) -> RoadCosts:
    """Return the costs with what a layer takes beyond link and kernels. Where tokens are launched,
    the host's own work is part of what was measured."""
    costs = replace(costs, deciding={"eviction late_horizon": ORDER_S})
    ahead = {"prefetch next_gate": HOST_AHEAD_S, "prefetch blend": HOST_AHEAD_S}
    host_s, device_s = (HOST_LAYER_S, DEVICE_LAYER_S) if has_graphs else (0.0, 0.0)
    by_host = replace(
        costs, rest=Work(costs.rest.memory_s + host_s), deciding=costs.deciding | ahead
    )
    by_itself = replace(costs, rest=Work(costs.rest.memory_s + device_s))
    return RoadCosts(by_host, by_itself, by_device)


def by_device(settings: Settings) -> frozenset[str]:
    """Return the candidates that a device could run by these settings."""
    asked = replace(settings, decide=HOST)  # which no preset refuses
    return frozenset(
        name for name in CANDIDATES if replace(asked, preset=preset(name)).may_decide_on_device
    )


def measured_costs(opened: MoeModel, link: LinkChoice, *, is_fused: bool) -> Costs:
    """Measure an expert, a layer's rest, a load over the link and an expert computed near."""
    threads = KernelThreads(torch.get_num_threads())
    try:
        dense = open_decoder(opened, choose_backend(opened), threads) if is_fused else None
        rest_s = rest_seconds(opened, dense=dense, is_fused=is_fused)
    finally:
        threads.close()
    costs = Costs(
        expert=Work(expert_seconds(opened, is_fused=is_fused)),
        load_s=0.0,
        load_latency_s=0.0,
        near=Work(0.0),
        rest=Work(rest_s / opened.shape.num_layers),
        head=Work(0.0),
    )
    return _with_loads(_with_near(costs, opened, link), opened, link)


def _with_near(costs: Costs, opened: MoeModel, link: LinkChoice) -> Costs:
    """Return the costs with those of the near tier: on a GPU's host the read of the expert, on a
    CPU what the expert costs anyway; both beside an emulated tier."""
    nbytes = opened.shape.expert_nbytes
    near_s = nbytes / link.near if link.near else 0.0
    if default_kind(opened.model.device) == "disk":  # a CPU
        return replace(costs, near=Work(near_s), near_host=costs.expert)
    return replace(costs, near=Work(near_s or nbytes / _ram_rate()), near_step_s=NEAR_STEP_S)


def _with_loads(costs: Costs, opened: MoeModel, link: LinkChoice) -> Costs:
    nbytes = opened.shape.expert_nbytes
    if link.kind == "emulated":
        return replace(costs, load_s=nbytes / link.bandwidth, load_latency_s=link.latency_s)
    if link.kind == "cuda":
        return replace(costs, load_s=_copy_seconds(nbytes, opened.model.device))
    read_s = _read_seconds(opened)
    if link.is_direct or opened.shape.nbytes > host_memory()[1]:
        # a near expert is read by the same disk, and compute waits for it
        return replace(costs, load_s=read_s, near_host=Work(math.inf))
    # from the page cache: a copy by the cores, and over the memory, that compute wants
    near_host = Work(costs.near_host.memory_s + read_s)
    return replace(costs, load_s=read_s / 2, host_s=read_s / 2, near_host=near_host)


def _read_seconds(opened: MoeModel) -> float:
    """Measure the read of an expert from the files, of the last layer: nothing else has read those
    when a model has just been opened."""
    content = aligned(opened.store.layout.nbytes)
    shape = opened.shape

    def read(turn: int) -> None:
        opened.store.read(shape.num_layers - 1, turn % shape.num_experts, content)

    return statistics.median(seconds_of(read, torch.device("cpu"), warm_up=0, turns=_TURNS))


def _copy_seconds(nbytes: int, device: torch.device) -> float:
    """Measure the copy of an expert from page-locked memory to the device."""
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    copy = partial(there.copy_, here, non_blocking=True)
    return statistics.median(seconds_of(lambda _: copy(), device, warm_up=1, turns=_TURNS))


def _ram_rate() -> float:
    """Measure the bytes per second at which the threads of this process read RAM."""
    read = torch.zeros(_READ_NBYTES // 8, dtype=torch.int64)
    seconds = seconds_of(lambda _: read.sum(), torch.device("cpu"), warm_up=1, turns=_TURNS)
    return _READ_NBYTES / statistics.median(seconds)
