"""Choice among the candidate presets: the fastest in a replay of synthetic routers, by the costs of
this model on this machine."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import isfinite

from artifacts.errors import Problem
from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import HERE, Machine
from artifacts.modelshapes.known import ModelShape
from artifacts.shape import Shape
from artifacts.traces.synthetic import Dials, generate
from artifacts.traces.trace import Trace
from runtime.policies.presets import CANDIDATES
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload

_MOST_LAYERS = 4  # layers of a synthetic trace are alike
# so skewed and local that lru, late_horizon and near hit as often as on recorded routing, between
# gpt-oss-20b's and the demo's; the prompt fills the slots, and 96 tokens are decoded
_ROUTERS = Dials(skew=1.1, locality=0.2, tokens=160, requests=1, prompt=64)
_EQUAL = 0.01  # share of the best time within which the candidate listed first is taken
_ANY = Machine(HERE, 1.0, 1.0, 1.0, 0.0, 1.0, "costs are given")


@dataclass(frozen=True, slots=True)
class RoadCosts:
    """Costs of the same model where the host decides what a token evicts, and where the device
    does; `by_device` are the candidates for which it may."""

    host: Costs
    device: Costs
    by_device: frozenset[str] = field(default_factory=frozenset)

    def of(self, candidate: str) -> Costs:
        return self.device if candidate in self.by_device else self.host


def fastest(
    roads: RoadCosts,
    shape: Shape,
    share: float,
    *,
    names: tuple[str, ...] = CANDIDATES,
    scope: str | None = None,
) -> tuple[str, float]:
    """Return the fastest candidate of a model that holds a share of its experts, the first of the
    list among those that are as fast, and its milliseconds for the experts' layers of a token.
    Without a `scope` each takes slots in its own."""
    few = replace(shape, num_layers=min(shape.num_layers, _MOST_LAYERS))
    times = dict(decoded_ms(roads, generate(_ROUTERS, few), few, share, names=names, scope=scope))
    best = min(times.values())
    chosen = next(name for name, ms in times.items() if ms <= best * (1 + _EQUAL))
    return chosen, times[chosen] * shape.num_layers / few.num_layers


def decoded_ms(
    roads: RoadCosts,
    trace: Trace,
    shape: Shape,
    share: float,
    *,
    names: tuple[str, ...],
    scope: str | None = None,
) -> Iterator[tuple[str, float]]:
    """Yield each candidate that the trace can tell of and the machine can run, and its milliseconds
    for a decoded token of the trace."""
    model = ModelShape("measured", shape, hidden=1)
    for name in names:
        costs = roads.of(name)
        setting = Setting(name, name, scope=scope, budget=f"{100 * share:.12f}%")
        near_s = max(costs.near.memory_s, costs.near_host.memory_s)
        if setting.build().miss.ratio_is_open and not isfinite(near_s):
            continue
        try:
            times = Workload(trace, model, _ANY, costs=costs).run(setting).times
        except Problem:
            continue
        if isfinite(times["tpot_ms"]):
            yield name, times["tpot_ms"]
