"""What a model costs on a machine as a live run takes it: this one, a link of a given rate, or one in whose proportions
link and near tier are emulated. What the simulator then ranks is what the run would measure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from artifacts.hardware import Machine, machine
from artifacts.measured import HardwareProfile
from artifacts.replicas import FULL_BITS
from profilers.hardware import (
    decode_experts,
    expert_spread,
    head_seconds,
    layer_seconds,
    pass_seconds,
)
from profilers.loads import QUICK, loads
from runtime import budget as sizes
from runtime.engine import NAME
from runtime.measured import HERE, costs_of
from runtime.model import MoeModel
from runtime.policies.base import Artefacts
from runtime.probe import scaled_window, without_experts
from runtime.session import EXACT, Session, Settings
from runtime.tiers import link_name
from runtime.timing import Costs, Work

_PROMPT = 16  # tokens, of which arithmetic is told


@dataclass(frozen=True, slots=True)
class Pace:
    """`settings`: options of `Settings`, by name, that emulate the machine; `costs` what the model then takes;
    `window`: bytes that may be prefetched a layer; `source`: where the costs are from, for a reader."""

    settings: Mapping[str, str]
    costs: Costs
    machine: Machine
    window: int
    source: str


def pace_of(
    opened: MoeModel,
    folder: Path,
    *,
    scaled_to: str | None,
    link: str,
    experts: str,
    artefacts: Artefacts,
    profile: HardwareProfile | None,
) -> Pace:
    """`profile`: this model's on this machine, if the store has one; it is of experts computed exactly, and where they
    are not, or there is none, all is measured quickly. Raises BadUsage for a link that is not understood."""
    target = machine(scaled_to) if scaled_to else None
    is_told = profile is not None and experts == EXACT
    base = _profiled(profile, opened) if is_told else _measured(opened, artefacts, experts)
    costs, settings = _with_link(base, opened, folder, target, link)
    found = target or _here(costs, opened.shape.expert_nbytes)
    window = scaled_window(opened.shape, target) if target else None
    window = window or costs.window_nbytes(opened.shape.expert_nbytes, opened.shape.top_k)
    source = "the store's hardware profile" if is_told else "measured quickly: `moectl profile --hardware` is thorough"
    if is_told and not base.shares:
        source += "; few bits are taken to be as much faster as smaller"
    return Pace(settings | {"window": f"{window}B", "experts": experts}, costs, found, window, source)


def _with_link(
    base: Costs, opened: MoeModel, folder: Path, target: Machine | None, link: str
) -> tuple[Costs, dict[str, str]]:
    """The costs with loads over the link that is meant, and the options that emulate it."""
    nbytes = opened.shape.expert_nbytes
    if target:
        here = nbytes / expert_spread(opened, 1, QUICK).median  # bytes a second that computing one takes them at
        rate, near = here * target.link_gbps / target.fast_gbps, here * target.near_gbps / target.fast_gbps
        costs = replace(base, load_s=nbytes / rate, load_latency_s=0.0, near=Work(nbytes / near))
        return costs, {"link": f"{rate:.0f}B/s", "near": f"{near:.0f}B/s"}
    name = link_name(opened, link)
    if name not in ("disk", "pinned"):
        bandwidth, latency_s = sizes.rate(link)
        return replace(base, load_s=nbytes / bandwidth, load_latency_s=latency_s), {"link": link}
    load = next(load for load in loads(opened, folder, name, QUICK) if load.link == name)
    return replace(base, load_s=load.seconds.median, load_latency_s=0.0), {"link": link}


def _here(costs: Costs, nbytes: int) -> Machine:
    """As bandwidths: one expert's bytes over the seconds that it took."""
    gb, near_s = nbytes / 1e9, costs.near.memory_s + costs.near_host_s
    link_gbps = gb / (costs.load_s + costs.load_latency_s)
    return Machine(HERE, gb / costs.expert.memory_s, float("inf"), link_gbps, 0.0, gb / near_s, "measured")


def _profiled(profile: HardwareProfile, opened: MoeModel) -> Costs:
    costs = costs_of(profile, opened.shape)
    if opened.model.device.type != "cpu":
        return costs
    low = {one.bits: one.seconds.median for one in profile.near if one.tokens == profile.near[0].tokens}
    shares = {bits: seconds / low[FULL_BITS] for bits, seconds in low.items() if bits != FULL_BITS}
    return _on_cpu(replace(costs, shares=shares), costs.near.memory_s)


def _on_cpu(costs: Costs, near_s: float) -> Costs:
    """Where both tiers compute on the same cores, a near expert takes time of whoever computes and no other."""
    return replace(costs, near=Work(0.0), near_host_s=near_s)


def _measured(opened: MoeModel, artefacts: Artefacts, experts: str) -> Costs:
    """Passes of one token, with experts there, brought, near, at few bits, or foreseen, each against the same pass
    without experts."""
    shape, device = opened.shape, opened.model.device.type
    there, beside = decode_experts(opened, _quick_link(opened), QUICK, experts=experts)
    one, many = (expert_spread(opened, tokens, QUICK).median for tokens in (1, _PROMPT))
    expert_s = min(one, there.median / shape.top_k)
    engine_s = there.median - shape.top_k * expert_s

    def each(settings: Settings) -> float:
        return max(0.0, (_added(opened, settings, artefacts) - engine_s) / shape.top_k)

    attention, prompt = (layer_seconds(opened, tokens, QUICK).median for tokens in (1, _PROMPT))
    near = each(Settings(policies={"miss": "near:fill=no"}, budget=f"{shape.num_layers}x", experts=experts))
    costs = Costs(
        expert=Work(expert_s, many / _PROMPT),
        load_s=0.0,
        load_latency_s=0.0,
        near=Work(near),
        rest=Work(attention + engine_s, (prompt + engine_s) / _PROMPT),
        head=Work(head_seconds(opened, 1, QUICK).median),
        host_s=max(0.0, beside["host"].median) if "host" in beside else 0.0,
        shares={
            bits: each(_at_bits(bits, artefacts, shape.num_keys, experts)) / expert_s for bits in _widths(artefacts)
        },
        foresee_s=_foresee(opened, artefacts, experts),
    )
    return _on_cpu(costs, near) if device == "cpu" else costs


def _quick_link(opened: MoeModel) -> str:
    """One over which experts come at once: only the engine's own work on them is asked for."""
    return "auto" if opened.model.device.type == "cuda" else "1000GB/s"


def _widths(artefacts: Artefacts) -> list[int]:
    return artefacts.replicas.widths if artefacts.replicas and artefacts.replicas.files else []


def _at_bits(bits: int, artefacts: Artefacts, num_keys: int, experts: str) -> Settings:
    budget = f"{artefacts.replicas.nbytes[bits] * num_keys}"
    return Settings("uniform-bits", {"residency": f"shadow:bits={bits},slots=no"}, budget=budget, experts=experts)


def _foresee(opened: MoeModel, artefacts: Artefacts, experts: str) -> float:
    """Seconds a layer of asking the next router, and of what is made of its answer."""
    plain, asking = (Settings("full", policies, experts=experts) for policies in ({}, {"prefetch": "next_gate"}))
    return max(0.0, _added(opened, asking, artefacts) - _added(opened, plain, artefacts))


def _added(opened: MoeModel, settings: Settings, artefacts: Artefacts) -> float:
    """Seconds a layer that experts add to a pass of one token; the median over tokens, each against its own pass
    without experts."""
    random, seconds = np.random.default_rng(0), []
    with Session(opened, settings, artefacts=artefacts) as session, torch.inference_mode():
        session.watcher.on_step = lambda step: None  # which keeps the controller deciding, as it must when less fits
        for turn in range(QUICK.warm_up + QUICK.turns):
            token = torch.from_numpy(random.integers(0, opened.config.vocab_size, (1, 1))).to(opened.model.device)
            if turn < QUICK.warm_up:
                session.forward(token)
                continue
            pass_seconds(session, token)  # brings what the full tier has not seen yet
            with_s = pass_seconds(session, token)
            with without_experts(opened, after=NAME):
                bare_s = min(pass_seconds(session, token) for _ in range(2))
            seconds.append((with_s - bare_s) / opened.shape.num_layers)
    return max(0.0, median(seconds))
