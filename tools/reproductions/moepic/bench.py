"""MoEpic's systems replayed under the paper's conditions: its loads, compute times, budgets,
rivals, ablations."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from artifacts.hardware.costs import Costs, Work
from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import MODELS
from artifacts.traces.synthetic import Dials, generate
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload

MACHINE = "a6000-pcie4"
EXPERTS_SHARE = 0.5  # of a layer's compute time; the paper does not say


@dataclass(frozen=True, slots=True)
class System:
    """A system as section 4.1 describes it, made of moectl's policies. `is_cacheless`: it holds two
    tokens' experts of one layer, those computed and those coming. `is_serial`: it computes no
    expert while it loads on demand."""

    preset: str
    policies: Mapping[str, str]
    scope: Scope = Scope.LAYER
    is_cacheless: bool = False
    is_serial: bool = False


MOEPIC = {
    "prefetch": "next_gate",
    "eviction": "lcp:uses=tokens",
    "residency": "split:prefer_solved=yes",
}
SYSTEMS: Mapping[str, System] = {
    "MoEpic": System("moepic", MOEPIC),
    "Pre-gated MoE": System("pre-gated", {}, Scope.GLOBAL, is_cacheless=True),
    "Mixtral-offloading": System("mixtral-offloading", {}),
    "AdapMoE": System("adapmoe", {"miss": "fetch"}),
    "MoE-Infinity": System("moe-infinity", {"eviction": "lfu"}),
}
ABLATIONS: Mapping[str, System] = {
    "w/o SP": System("moepic", MOEPIC | {"prefetch": "random"}),
    "w/o LCP": System("moepic", MOEPIC | {"eviction": "random"}),
    "w/o CCA": System("moepic", MOEPIC | {"residency": "split:theta=0.5"}),
}
BASELINES: Mapping[str, System] = {
    "Prefetch Only": System("mixtral-offloading", {}, Scope.GLOBAL, is_cacheless=True),
    "Cache Only": System("moepic", MOEPIC | {"prefetch": "none", "residency": "split:theta=1.0"}),
}


SWITCHED_OFF = System(
    "moepic", {"prefetch": "none", "eviction": "lru", "residency": "split:theta=1.0"}
)


def cut_at(theta: float, **policies: str) -> System:
    """MoEpic with all layers alike, all cut at `theta`."""
    return System("moepic", MOEPIC | {"residency": f"split:theta={theta}"} | policies)


def without_prefetch(system: System) -> System:
    return replace(system, policies={**system.policies, "prefetch": "none"})


@dataclass(frozen=True)
class Conditions:
    """A model, its milliseconds for one load and for a token's compute in all layers, and the
    trace; `num_layers` of its layers are replayed."""

    shape: str
    load_ms: float
    compute_ms: float
    num_layers: int
    dials: Dials

    def tpot_ms(self, system: System, experts: float) -> float:
        """Return milliseconds a token of the whole model, with a budget of `experts` experts over
        all its layers."""
        return self._scale * self._times(system, experts)["tpot_ms"]

    def ttft_ms(self, system: System, experts: float) -> float:
        """Milliseconds to the first token of the whole model."""
        return self._scale * self._times(system, experts)["ttft_ms"]

    def split(self, experts: float) -> str:
        """Return a text of the cuts that MoEpic makes and of what each layer holds, found by
        replay."""
        source = self._workload.solved(self._setting(SYSTEMS["MoEpic"], experts)).source
        return source.partition(", the fastest")[0]

    @property
    def window(self) -> float:
        """Experts that the link brings while a layer is computed, not rounded."""
        return self.compute_ms / self._whole_layers / self.load_ms

    @property
    def _whole_layers(self) -> int:
        return MODELS[self.shape].shape.num_layers

    @property
    def _scale(self) -> float:
        return self._whole_layers / self.num_layers

    def _setting(self, system: System, experts: float) -> Setting:
        """The buffer of K experts is beside the budget for every system, as section 4.1 has it."""
        top_k = MODELS[self.shape].shape.top_k
        held = 2 * top_k if system.is_cacheless else experts / self._scale + top_k
        return Setting(
            system.preset, system.preset, system.policies, scope=system.scope, budget=f"{held:.6g}x"
        )

    def _times(self, system: System, experts: float) -> Mapping[str, float]:
        setting = self._setting(system, experts)
        key = (system.preset, *sorted(setting.policies.items()), setting.scope, setting.budget)
        key += (system.is_serial,)
        if key not in self._known:
            workload = self._made(Artefacts(), 0.0) if system.is_serial else self._workload
            if system.policies.get("residency") == MOEPIC["residency"]:
                # The ablations follow the split of the whole.
                solved = workload.solved(self._setting(SYSTEMS["MoEpic"], experts))
                workload = self._made(Artefacts(splits=(solved,)))
            self._known[key] = workload.run(setting).times
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple, Mapping[str, float]]:
        return {}

    @cached_property
    def _workload(self) -> Workload:
        return self._made(Artefacts())

    def _made(self, artefacts: Artefacts, experts_share: float = EXPERTS_SHARE) -> Workload:
        """Return the workload; without a share of their own, experts are computed with the rest of
        the next layer, behind all loads of theirs."""
        model = self._model
        named = machine(MACHINE)
        layer_s = self.compute_ms / self._whole_layers / 1e3
        top_k = model.shape.top_k
        costs = replace(
            Costs.of(model, named),
            expert=Work(experts_share * layer_s / top_k),
            rest=Work((1 - experts_share) * layer_s),
            head=Work(0.0),
            load_s=self.load_ms / 1e3,
            load_latency_s=0.0,
        )
        window = round(self.window * model.shape.expert_nbytes)
        return Workload(self._trace, model, named, artefacts=artefacts, costs=costs, window=window)

    @cached_property
    def _model(self):
        model = MODELS[self.shape]
        return replace(model, shape=replace(model.shape, num_layers=self.num_layers))

    @cached_property
    def _trace(self):
        return generate(self.dials, self._model.shape)
