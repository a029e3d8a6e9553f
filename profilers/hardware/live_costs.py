"""What a model costs on a machine as a live run takes it: this one, a link of a given rate, or one in whose proportions
link and near tier are emulated. What the simulator then ranks is what the run would measure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import thread_time

import numpy as np
import torch

from artifacts.hardware.costs import Costs, Work
from artifacts.hardware.machines import HERE, Machine, machine
from artifacts.hardware.profile import HardwareProfile
from artifacts.shape import FULL_BITS
from profilers.hardware.load_times import QUICK, loads
from profilers.hardware.policy_overhead import deciding
from profilers.hardware.profile import expert_spread, head_seconds, layer_seconds, pass_seconds
from runtime.control import sizes
from runtime.engine.engine import NAME
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.replay.measured_machine import costs_of
from runtime.session.link_choice import link_name
from runtime.session.probe import scaled_window, without_experts
from runtime.session.session import Session, Settings
from runtime.session.settings import EXACT

_PROMPT = 16  # tokens, of which arithmetic is told
_TURNS, _FEW = 24, 4  # tokens on which a part, and a policy's own work, is measured


@dataclass(frozen=True, slots=True)
class LiveCosts:
    """`settings`: options of `Settings`, by name, that emulate the machine; `costs` what the model then takes;
    `window`: bytes that may be prefetched a layer; `source`: where the costs are from, for a reader."""

    settings: Mapping[str, str]
    costs: Costs
    machine: Machine
    window: int
    source: str


def live_costs(
    opened: MoeModel,
    folder: Path,
    *,
    scaled_to: str | None,
    link: str,
    experts: str,
    artefacts: Artefacts,
    profile: HardwareProfile | None,
) -> LiveCosts:
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
    return LiveCosts(settings | {"window": f"{window}B", "experts": experts}, costs, found, window, source)


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
    gb, near_s = nbytes / 1e9, max(costs.near.memory_s + costs.near_host.memory_s, 1e-9)
    link_gbps = gb / (costs.load_s + costs.load_latency_s)
    return Machine(HERE, gb / costs.expert.memory_s, float("inf"), link_gbps, 0.0, gb / near_s, "measured")


def _profiled(profile: HardwareProfile, opened: MoeModel) -> Costs:
    share = opened.shape.expert_nbytes / opened.stored_shape.expert_nbytes
    costs = costs_of(profile, opened.stored_shape)
    if opened.model.device.type != "cpu":
        return costs.on_base(opened.base, share)
    low = {one.bits: one.seconds.median for one in profile.near if one.tokens == profile.near[0].tokens}
    shares = {bits: seconds / low[FULL_BITS] for bits, seconds in low.items() if bits != FULL_BITS}
    return replace(costs, shares=shares).on_base(opened.base, share)


@dataclass(frozen=True, slots=True)
class _Pass:
    """Seconds of a pass of one token, by layer: what experts add, and the rest, the head left out."""

    experts_s: float
    rest_s: float


class _Probe:
    """Runs a model's own sessions token by token. On a CPU its time is what the thread was given, else it is the
    clock's; of each part the least counts, for other work on the machine only ever adds."""

    def __init__(self, opened: MoeModel, artefacts: Artefacts, experts: str) -> None:
        self._opened, self._artefacts = opened, artefacts
        self._is_gpu = opened.model.device.type == "cuda"
        # From RAM, and at once: what a link takes is told apart.
        self.link = "auto" if self._is_gpu else "1000GB/s"
        self._beside = {"link": self.link, "experts": experts}
        self.head_s = head_seconds(opened, 1, QUICK).median

    def seconds(self, preset: str, policies: Mapping[str, str], budget: str = "100%", *, turns: int = _TURNS) -> _Pass:
        """Raises a Problem for what cannot run."""
        with self._session(preset, policies, budget) as session, torch.inference_mode():
            found = [self._turn(session, token)[1:] for token in self._tokens(turns)]
        there_s, bare_s = (min(own) for own in zip(*found, strict=True))
        layers = self._opened.shape.num_layers
        return _Pass(max(0.0, there_s - bare_s) / layers, (bare_s - self.head_s) / layers)

    def host_seconds(self) -> float:
        """Of the engine's own work on a load: a token comes twice into a tier that holds one token's experts."""
        shape, added = self._opened.shape, []
        with self._session("on-demand", {}, f"{shape.num_layers * shape.top_k}x") as session, torch.inference_mode():
            for token in self._tokens(_TURNS):
                brought_s, there_s, _ = self._turn(session, token)
                waited_s = 0.0 if not self._is_gpu else session.engine.stall_s[0]
                session.engine.stall_s.clear()
                misses = sum(one["misses"] for one in session.controller.counters.by_layer(first_pass=-4))
                added += [(brought_s - waited_s - there_s) / misses] if misses else []
        return max(0.0, median(added)) if added else 0.0

    def _session(self, preset: str, policies: Mapping[str, str], budget: str) -> Session:
        session = Session(
            self._opened, Settings(preset, dict(policies), budget=budget, **self._beside), artefacts=self._artefacts
        )
        session.watcher.on_step = lambda step: None  # which keeps the controller deciding, as it must when less fits
        return session

    def _tokens(self, turns: int) -> Iterator[torch.Tensor]:
        random = np.random.default_rng(0)
        for _ in range(turns):
            yield torch.from_numpy(random.integers(0, self._opened.config.vocab_size, (1, 1)))

    def _turn(self, session: Session, token: torch.Tensor) -> tuple[float, float, float]:
        """Seconds of a pass that may bring its experts, of the next, and of one without experts."""
        brought_s, there_s = self._pass(session, token), self._pass(session, token)
        with without_experts(self._opened, after=NAME):
            bare_s = min(self._pass(session, token) for _ in range(2))  # the first finds colder caches
        return brought_s, there_s, bare_s

    def _pass(self, session: Session, token: torch.Tensor) -> float:
        if self._is_gpu:
            return pass_seconds(session, token)
        begin_s = thread_time()
        session.forward(token)
        return thread_time() - begin_s


def _measured(opened: MoeModel, artefacts: Artefacts, experts: str) -> Costs:
    """Passes of one token, with experts there, near, brought or at few bits, or with other policies, each against the
    same pass without."""
    shape, probe = opened.shape, _Probe(opened, artefacts, experts)
    there = probe.seconds("full", {})
    one, many = (expert_spread(opened, tokens, QUICK).median for tokens in (1, _PROMPT))
    expert_s = min(one, there.experts_s / shape.top_k)
    engine_s = there.experts_s - shape.top_k * expert_s

    def each(preset: str, policies: Mapping[str, str], budget: str) -> float:
        return max(0.0, (probe.seconds(preset, policies, budget).experts_s - engine_s) / shape.top_k)

    def at(bits: int) -> float:
        budget = f"{artefacts.replicas.nbytes[bits] * shape.num_keys}"
        return each("uniform-bits", {"residency": f"shadow:bits={bits},slots=no"}, budget)

    near_s = each("near", {"miss": "near:fill=no"}, f"{shape.num_layers}x")
    prompt_s = layer_seconds(opened, _PROMPT, QUICK).median
    is_gpu, near = opened.model.device.type == "cuda", Work(near_s)
    return Costs(
        expert=Work(expert_s, many / _PROMPT),
        load_s=0.0,
        load_latency_s=0.0,
        near=near if is_gpu else Work(0.0),
        near_host=Work(0.0) if is_gpu else near,  # on the same cores it takes time of whoever computes and no other
        rest=Work(there.rest_s + engine_s, (prompt_s + engine_s) / _PROMPT),
        head=Work(probe.head_s),
        host_s=probe.host_seconds(),
        shares={bits: at(bits) / expert_s for bits in _widths(artefacts)},
        deciding=deciding(opened, probe.link, tokens=_FEW, experts=experts, artefacts=artefacts),
    )


def _widths(artefacts: Artefacts) -> list[int]:
    return artefacts.replicas.widths if artefacts.replicas and artefacts.replicas.files else []
