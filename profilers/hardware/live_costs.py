"""Measures a model's costs as a live run has them: on this machine, over a link of a given rate, or
with link and near tier emulated in another machine's proportions. The simulator then ranks policies
by the times of a run on that machine."""

from collections.abc import Callable, Iterator, Mapping
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
from profilers.hardware.policy_overhead import deciding, misses_of
from profilers.hardware.profile import expert_spread, head_seconds, layer_seconds, pass_seconds
from runtime.control import sizes
from runtime.devices import is_host
from runtime.engine.engine import NAME
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.replay.measured_machine import costs_of
from runtime.session.link_choice import link_name
from runtime.session.probe import scaled_window, without_experts
from runtime.session.session import Session, Settings
from runtime.session.settings import EXACT

_PROMPT = 16  # tokens of the prompt whose arithmetic is measured
# tokens on which a part of a pass, and a policy's own work, is measured
_TURNS = 24
_FEW = 4


@dataclass(frozen=True, slots=True)
class LiveCosts:
    """A model's `costs` on a machine, and the options of `Settings`, by name, that emulate it.
    `window` are the bytes that may be prefetched per layer; `source` says in words where the costs
    are from."""

    settings: Mapping[str, str]
    costs: Costs
    machine: Machine
    window: int
    source: str
    is_profiled: bool = False


def live_costs(
    opened: MoeModel,
    folder: Path,
    *,
    scaled_to: str | None,
    link: str,
    experts: str,
    artefacts: Artefacts,
    profile: HardwareProfile | None,
    is_late: Callable[[], bool] = lambda: False,
) -> LiveCosts:
    """Return the costs over `link`, or scaled to the machine `scaled_to`.

    `profile` is this model's on this machine, if the store has one. It applies to experts computed
    exactly; otherwise everything is measured quickly, and when it `is_late`, in fewer turns and
    without the widths and policies that are left. Raises BadUsage for a link that is not
    understood.
    """
    target = machine(scaled_to) if scaled_to else None
    is_profiled = profile is not None and experts == EXACT
    base = (
        _profiled(profile, opened)
        if is_profiled
        else _measured(opened, artefacts, experts, is_late)
    )
    costs, settings = _with_link(base, opened, folder, target, link)
    emulated = target or _this_machine(costs, opened.shape.expert_nbytes)
    window = scaled_window(opened.shape, target) if target else None
    window = window or costs.window_nbytes(opened.shape.expert_nbytes, opened.shape.top_k)
    source = "measured quickly: `moectl profile --hardware` is thorough"
    source = "the store's hardware profile" if is_profiled else source
    if is_profiled and not base.shares:
        source += "; few bits are taken to be as much faster as smaller"
    return LiveCosts(
        settings | {"window": f"{window}B", "experts": experts},
        costs,
        emulated,
        window,
        source,
        is_profiled,
    )


def _with_link(
    base: Costs, opened: MoeModel, folder: Path, target: Machine | None, link: str
) -> tuple[Costs, dict[str, str]]:
    """Return the costs with loads over the chosen link, and the options that emulate the link."""
    nbytes = opened.shape.expert_nbytes
    if target:
        # bytes per second at which an expert is computed
        fast = nbytes / expert_spread(opened, 1, QUICK).median
        rate = fast * target.link_gbps / target.fast_gbps
        near = fast * target.near_gbps / target.fast_gbps
        costs = replace(base, load_s=nbytes / rate, load_latency_s=0.0, near=Work(nbytes / near))
        return costs, {"link": f"{rate:.0f}B/s", "near": f"{near:.0f}B/s"}
    name = link_name(opened, link)
    if name not in ("disk", "pinned"):
        bandwidth, latency_s = sizes.rate(link)
        return replace(base, load_s=nbytes / bandwidth, load_latency_s=latency_s), {"link": link}
    load = next(load for load in loads(opened, folder, name, QUICK) if load.link == name)
    return replace(base, load_s=load.seconds.median, load_latency_s=0.0), {"link": link}


def _this_machine(costs: Costs, nbytes: int) -> Machine:
    """Return the costs as bandwidths: one expert's bytes over the seconds that it takes."""
    gb = nbytes / 1e9
    near_s = max(costs.near.memory_s + costs.near_host.memory_s, 1e-9)
    link_gbps = gb / (costs.load_s + costs.load_latency_s)
    return Machine(
        HERE, gb / costs.expert.memory_s, float("inf"), link_gbps, 0.0, gb / near_s, "measured"
    )


def _profiled(profile: HardwareProfile, opened: MoeModel) -> Costs:
    share = opened.shape.expert_nbytes / opened.stored_shape.expert_nbytes
    costs = costs_of(profile, opened.stored_shape)
    if not is_host(opened.model.device):
        return costs.on_base(opened.base, share)
    near_s = {
        near.bits: near.seconds.median
        for near in profile.near
        if near.tokens == profile.near[0].tokens
    }
    shares = {
        bits: seconds / near_s[FULL_BITS] for bits, seconds in near_s.items() if bits != FULL_BITS
    }
    return replace(costs, shares=shares).on_base(opened.base, share)


@dataclass(frozen=True, slots=True)
class _Pass:
    """Seconds per layer of a pass of one token: of the experts, and of the rest without the
    head."""

    experts_s: float
    rest_s: float


class _Probe:
    """Runs a model's own sessions token by token. On a CPU it measures the thread's processor time,
    else the clock's. The least time of each part counts, because other work on the machine can only
    add to it."""

    def __init__(
        self, opened: MoeModel, artefacts: Artefacts, experts: str, is_late: Callable[[], bool]
    ) -> None:
        self._opened = opened
        self._artefacts = artefacts
        self._is_late = is_late
        self._is_gpu = not is_host(opened.model.device)
        # Experts come from RAM without delay: the costs of the link are measured separately.
        self.link = "auto" if self._is_gpu else "1000GB/s"
        self._options = {"link": self.link, "experts": experts}
        self.head_s = head_seconds(opened, 1, QUICK).median

    def seconds(self, preset: str, policies: Mapping[str, str], budget: str = "100%") -> _Pass:
        """Measure a pass whose experts are resident. Raises a Problem for settings that cannot
        run."""
        with self._session(preset, policies, budget) as session, torch.inference_mode():
            turns_s = [self._turn(session, token)[1:] for token in self._tokens()]
        resident_s, bare_s = (min(part_s) for part_s in zip(*turns_s, strict=True))
        num_layers = self._opened.shape.num_layers
        return _Pass(
            max(0.0, resident_s - bare_s) / num_layers, (bare_s - self.head_s) / num_layers
        )

    def host_seconds(self) -> float:
        """Measure the engine's own work on a load: each token is decoded twice with a tier that
        holds one token's experts."""
        shape = self._opened.shape
        added = []
        with (
            self._session("on-demand", {}, f"{shape.num_layers * shape.top_k}x") as session,
            torch.inference_mode(),
        ):
            for token in self._tokens():
                loading_s, resident_s, _ = self._turn(session, token)
                stall_s = 0.0 if not self._is_gpu else session.engine.stall_s[0]
                session.engine.stall_s.clear()
                num_misses = misses_of(session, 4)
                added += [(loading_s - stall_s - resident_s) / num_misses] if num_misses else []
        return max(0.0, median(added)) if added else 0.0

    def _session(self, preset: str, policies: Mapping[str, str], budget: str) -> Session:
        session = Session(
            self._opened,
            Settings(preset, dict(policies), budget=budget, **self._options),
            artefacts=self._artefacts,
        )
        # makes the controller decide even where the whole model fits
        session.watcher.on_step = lambda step: None
        return session

    def _tokens(self) -> Iterator[torch.Tensor]:
        random = np.random.default_rng(0)
        for turn in range(_TURNS):
            if turn >= _FEW and self._is_late():
                return
            yield torch.from_numpy(random.integers(0, self._opened.config.vocab_size, (1, 1)))

    def _turn(self, session: Session, token: torch.Tensor) -> tuple[float, float, float]:
        """Return the seconds of a pass that may load its experts, of the pass again, and of one
        without experts."""
        loading_s = self._pass(session, token)
        resident_s = self._pass(session, token)
        with without_experts(self._opened, after=NAME):
            # processor caches are colder in the first
            bare_s = min(self._pass(session, token) for _ in range(2))
        return loading_s, resident_s, bare_s

    def _pass(self, session: Session, token: torch.Tensor) -> float:
        if self._is_gpu:
            return pass_seconds(session, token)
        begin_s = thread_time()
        session.forward(token)
        return thread_time() - begin_s


def _measured(
    opened: MoeModel, artefacts: Artefacts, experts: str, is_late: Callable[[], bool]
) -> Costs:
    """Measure passes of one token with experts resident, near, loaded or at few bits, each against
    a pass without experts."""
    shape = opened.shape
    probe = _Probe(opened, artefacts, experts, is_late)
    resident = probe.seconds("full", {})
    one_s, many_s = (expert_spread(opened, tokens, QUICK).median for tokens in (1, _PROMPT))
    expert_s = min(one_s, resident.experts_s / shape.top_k)
    engine_s = resident.experts_s - shape.top_k * expert_s

    def per_expert(preset: str, policies: Mapping[str, str], budget: str) -> float:
        return max(
            0.0, (probe.seconds(preset, policies, budget).experts_s - engine_s) / shape.top_k
        )

    def at_width(bits: int) -> float:
        budget = f"{artefacts.replicas.nbytes[bits] * shape.num_keys}"
        return per_expert("uniform-bits", {"residency": f"shadow:bits={bits},slots=no"}, budget)

    near_s = per_expert("near", {"miss": "near:fill=no"}, f"{shape.num_layers}x")
    prompt_s = layer_seconds(opened, _PROMPT, QUICK).median
    on_host = is_host(opened.model.device)
    near = Work(near_s)
    return Costs(
        expert=Work(expert_s, many_s / _PROMPT),
        load_s=0.0,
        load_latency_s=0.0,
        near=Work(0.0) if on_host else near,
        # without a GPU the near tier computes on the same cores as the model
        near_host=near if on_host else Work(0.0),
        rest=Work(resident.rest_s + engine_s, (prompt_s + engine_s) / _PROMPT),
        head=Work(probe.head_s),
        host_s=probe.host_seconds(),
        shares={bits: at_width(bits) / expert_s for bits in _widths(artefacts) if not is_late()},
        deciding=deciding(
            opened, probe.link, tokens=_FEW, experts=experts, artefacts=artefacts, is_late=is_late
        ),
    )


def _widths(artefacts: Artefacts) -> list[int]:
    return artefacts.replicas.widths if artefacts.replicas and artefacts.replicas.files else []
