"""`moectl simulate`: replay a trace through the policies on virtual time, beside on-demand loading
and the oracles."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from artifacts.errors import BadUsage
from artifacts.formats.dense import check_dense
from artifacts.hardware.machines import HERE
from artifacts.quantisation.replicas import check_base
from artifacts.shape import FULL_BITS
from artifacts.traces.clients import Clients
from moectl.commands.measure.simulate import table as simulate_table
from moectl.commands.measure.simulate.table import PLAIN, Simulated, label
from moectl.shared.names import names_in
from moectl.shared.place_trace import place_trace
from moectl.shared.resuming import resumable
from moectl.shared.timed_machine import timed_machine
from moectl.shared.trace_source import TraceSource, open_source
from moectl.show.counters import devices_sheet
from moectl.show.render import show_json, show_sheet
from runtime.control import sizes
from runtime.control.serving import Service, controller_kind
from runtime.policies import names, parse
from runtime.policies.presets import Preset, Scope, preset, presets
from runtime.replay.settings import Outcome, Setting, oracles
from runtime.replay.workload import Workload
from runtime.session.presets import find_presets


@dataclass(frozen=True, slots=True)
class SimulateRequest:
    """Request for a simulation: a preset with its axes overridden, or `compare`, the names of
    presets or eviction policies.

    `stored` has the store's presets by name. Raises BadUsage for a value that is not understood.
    """

    preset: str = PLAIN
    policies: dict[str, str] = field(default_factory=dict)
    scope: str | None = None
    budget: str = "25%"
    window: str | None = None
    machine: str = "a100-pcie4"
    compare: str | None = None
    devices: int = 1
    reconfigure_every: int | None = None
    base: int = FULL_BITS
    dense: int | None = None
    serving: str = str(Service.PINNED)
    clients: Clients | None = None
    stored: Mapping[str, Preset] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.scope not in (None, *Scope):
            raise BadUsage(f"scope is layer or global, not {self.scope!r}")
        check_base(self.base)
        check_dense(self.dense)
        if self.machine != HERE:
            timed_machine(self.machine)
        for setting in self.settings():
            controller_kind(self.serving, setting.build())

    def settings(self) -> list[Setting]:
        """Return the settings asked for, in their order. Raises BadUsage for an unknown name."""
        if self.compare is None:
            return [self._setting("asked", self.preset, self.policies)]
        names = names_in(self.compare)
        are_evictions = any(self._is_eviction(name) and not self._is_preset(name) for name in names)
        return [self._compared(name, are_evictions=are_evictions) for name in names]

    def _is_preset(self, name: str) -> bool:
        return name in presets() or name in self.stored

    def _is_eviction(self, name: str) -> bool:
        return name.partition(":")[0] in names("eviction")

    def _setting(self, label: str, preset: str, policies: dict[str, str]) -> Setting:
        return Setting(
            label,
            self.stored.get(preset, preset),
            policies,
            self.scope,
            self.budget,
            self.reconfigure_every,
            self.devices,
            self.serving,
        )

    def _compared(self, name: str, *, are_evictions: bool) -> Setting:
        """Return the setting of one of several names; one that presets and evictions share is an
        eviction beside other evictions. Only policies that split experts solve their split anew."""
        if self._is_preset(name) and not (are_evictions and self._is_eviction(name)):
            setting = self._setting(name, name, self.policies)
        else:
            parse("eviction", name)
            setting = self._setting(name, self.preset, self.policies | {"eviction": name})
        return (
            setting if setting.build().residency.cuts else replace(setting, reconfigure_every=None)
        )


@resumable()
def simulate(source: TraceSource, request: SimulateRequest) -> Simulated:
    """Replay the source's trace once for each setting, for on-demand loading and for the
    oracles."""
    settings = request.settings()
    with_maps = any("maps" in setting.build().requires for setting in settings)
    opened = open_source(replace(source, with_maps=with_maps))
    if opened.model_id:
        request = replace(
            request, stored=find_presets(request.stored, source.store, model_id=opened.model_id)
        )
        settings = request.settings()
    opened, chosen, costs = place_trace(
        opened, request.machine, source.store, base=request.base, dense=request.dense
    )
    workload = Workload(
        opened.trace,
        opened.model,
        chosen,
        artefacts=opened.artefacts,
        window=sizes.nbytes(request.window) if request.window else None,
        costs=costs,
        dense=request.dense,
        clients=request.clients,
    )
    asked = [workload.run(setting) for setting in settings]
    plain = replace(
        Setting(
            PLAIN, PLAIN, budget=request.budget, devices=request.devices, serving=request.serving
        ),
        scope=settings[0].scope or str(asked[0].scope),
    )
    beside = [workload.run(setting) for setting in (plain, *oracles(plain))]
    shown = [_identity(outcome) for outcome in asked]
    beside = [outcome for outcome in beside if _identity(outcome) not in shown]
    return Simulated(
        asked,
        beside,
        workload.trace,
        opened.model,
        workload.machine,
        opened.name,
        workload.assumed,
        request.base,
        request.dense,
        request.clients,
        workload.served,
    )


def show(simulated: Simulated, *, as_json: bool) -> None:
    """Print a table, or one JSON object: the first outcome by itself, and all of them as rows."""
    if as_json:
        first = simulated.asked[0]
        show_json(
            {
                "counters": first.counters | {"exposed_ms": first.times["exposed_ms"]},
                "by_layer": first.by_layer,
                **first.times,
                "rows": simulate_table.records(simulated),
                "receipt": receipt(simulated),
            }
        )
        return
    show_sheet(simulate_table.comparison(simulated))
    if devices := _devices(simulated.asked[0]):
        show_sheet(devices_sheet(devices))
    for line in simulated.assumed:
        print(f"assumed: {line}")


def receipt(simulated: Simulated) -> dict[str, object]:
    """Return what was in force for the first setting."""
    first = simulated.asked[0]
    shape = simulated.model.shape
    return {
        "trace": simulated.source,
        "rows": len(simulated.trace),
        "model": simulated.model.name,
        "machine": simulated.machine.name,
        "layers": shape.num_layers,
        "experts_per_layer": shape.num_experts,
        "top_k": shape.top_k,
        "expert_bytes": shape.expert_nbytes,
        "base_bits": simulated.base,
        "dense_bits": simulated.dense,
        "preset": preset(first.setting.preset).name,
        "tuned_for": preset(first.setting.preset).tuned_for,
        "policies": first.policies,
        "scope": str(first.scope),
        "serving": first.setting.serving,
        "slots": first.num_slots,
        "devices": _devices(first),
        "split": first.split,
        "prefetch_window_bytes": first.window,
        "clients": simulated.clients and asdict(simulated.clients),
        "assumed": simulated.assumed,
    }


def _devices(outcome: Outcome) -> dict[str, dict[str, int]]:
    return {f"device {number}": counts for number, counts in enumerate(outcome.by_device)}


def _identity(outcome: Outcome) -> tuple:
    """Return the key by which two rows are the same."""
    return label(outcome), outcome.policies, outcome.scope, outcome.num_slots, outcome.window
