"""The result of `moectl simulate` as a table: the settings asked for, and the baselines beside
them."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from artifacts.hardware.machines import Machine
from artifacts.modelshapes.known import ModelShape
from artifacts.traces.clients import Clients, Served
from artifacts.traces.trace import Trace
from moectl.shared.place_trace import base_suffix
from moectl.show import grounds
from moectl.show.counters import devices_sheet
from moectl.show.render import NumBytes, Sheet, human_bytes, show_json, show_sheet
from runtime.control.counters import altered, hit_rate, is_exact
from runtime.policies import POLICIES
from runtime.policies.presets import preset
from runtime.replay.settings import Outcome

PLAIN = "on-demand"
_COUNTS = ("late", "misses", "collisions")
_BYTES = {"demand": "demand_bytes", "prefetched": "prefetch_bytes", "wasted": "wasted_bytes"}
_TIMES = ("ttft_ms", "tpot_ms", "tokens_per_s", "exposed_ms", "near_ms")
_TAILS = ("ttft_p95_ms", "tpot_p95_ms")
_ADDED = (
    "* not asked for: on-demand keeps the most recently used; belady loads on demand and knows "
    "the future; oracle besides prefetches what is really wanted, as far as the link carries"
)
_DRAFTED: dict[str, Callable[[Outcome], object]] = {
    "accepted": lambda outcome: outcome.acceptance,
    "tokens a pass": lambda outcome: outcome.tokens_per_pass,
}


@dataclass(frozen=True, slots=True)
class Simulated:
    """`asked` has the outcomes in the order asked for, `beside` the baselines that were not asked
    for. `served` is what clients were served, if there are any, with `trace` as it was computed."""

    asked: list[Outcome]
    beside: list[Outcome]
    trace: Trace
    model: ModelShape
    machine: Machine
    source: str
    assumed: list[str]
    base: int
    dense: int | None
    clients: Clients | None = None
    served: Served | None = None

    @property
    def outcomes(self) -> list[Outcome]:
        return [*self.asked, *self.beside]

    @property
    def grounds(self) -> grounds.Grounds:
        return grounds.simulated(self.machine.name, self.model.shape.nbytes)

    @property
    def plain(self) -> Outcome:
        """Loading on demand, which is always there."""
        return next(outcome for outcome in reversed(self.outcomes) if label(outcome) == PLAIN)


def label(outcome: Outcome) -> str:
    """Return the name that was asked for, else the preset and its overridden policies."""
    if outcome.setting.label != "asked":
        return outcome.setting.label
    changed = [outcome.policies[axis] for axis in POLICIES if axis in outcome.setting.policies]
    return " + ".join([preset(outcome.setting.preset).name, *changed])


def show(simulated: Simulated, *, as_json: bool) -> None:
    """Print a table, or one JSON object: the first outcome by itself, and all of them as rows."""
    if as_json:
        first = simulated.asked[0]
        show_json(
            {
                "counters": first.counters | {"exposed_ms": first.times["exposed_ms"]},
                "by_layer": first.by_layer,
                **first.times,
                "rows": _records(simulated),
                "receipt": _receipt(simulated),
            }
        )
        return
    show_sheet(_comparison(simulated))
    if devices := _devices(simulated.asked[0]):
        show_sheet(devices_sheet(devices))
    for line in simulated.assumed:
        print(f"assumed: {line}")


def _receipt(simulated: Simulated) -> dict[str, object]:
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


def _records(simulated: Simulated) -> list[dict[str, object]]:
    """Every outcome as JSON values: counters, and times on the machine's data sheet or as it was
    measured."""
    return [
        {
            "policies": label(outcome),
            "scope": str(outcome.scope),
            "experts_held": outcome.num_slots,
            "hit_rate": hit_rate(outcome.counters),
            **{name: outcome.counters[name] for name in _COUNTS},
            **{name: outcome.counters[key] for name, key in _BYTES.items()},
            **{name: outcome.times[name] for name in _TIMES},
            "acceptance": outcome.acceptance,
            "tokens_per_pass": outcome.tokens_per_pass,
            **_of_clients(simulated, outcome),
            "is_exact": is_exact(altered(outcome.counters)),
            "is_added": outcome in simulated.beside,
            "times_on_demand": _to(simulated.plain, "tpot_ms", outcome),
        }
        for outcome in simulated.outcomes
    ]


def _of_clients(simulated: Simulated, outcome: Outcome) -> dict[str, float | None]:
    """Return the p95 times that clients see, the bytes moved for each token of an answer, and the
    distinct experts and the tokens of a step; empty if there are no clients."""
    if simulated.served is None:
        return {}
    moved_nbytes = sum(outcome.counters[name] for name in ("demand_bytes", "prefetch_bytes"))
    num_steps = len(outcome.passes) * simulated.model.shape.num_layers
    return {
        **{name: outcome.times[name] for name in _TAILS},
        "bytes_per_token": moved_nbytes / len(simulated.served.answers),
        "experts_per_step": outcome.counters["requests"] / num_steps,
        "tokens_per_step": len(simulated.trace) / num_steps,
    }


def _comparison(simulated: Simulated) -> Sheet:
    """A row for each setting: exact ones first, what nobody asked for at the end."""
    rows = (
        sorted(simulated.asked, key=lambda outcome: not is_exact(altered(outcome.counters)))
        + simulated.beside
    )
    columns: dict[str, Callable[[Outcome], object]] = {
        "policies": lambda outcome: label(outcome) + " *" * (outcome in simulated.beside),
        "output": lambda outcome: "exact" if is_exact(altered(outcome.counters)) else "altered",
        "hit rate": lambda outcome: hit_rate(outcome.counters),
        **(_absolute() if simulated.grounds.is_absolute else _ratios(simulated.plain)),
        **(_clients(simulated) if simulated.served else {}),
        **(_DRAFTED if simulated.plain.acceptance is not None else {}),
        "scope": lambda outcome: str(outcome.scope),
        "experts held": lambda outcome: outcome.num_slots,
        **{name: lambda outcome, name=name: outcome.counters[name] for name in _COUNTS},
        **{
            name: lambda outcome, key=key: NumBytes(outcome.counters[key])
            for name, key in _BYTES.items()
        },
    }
    shape = simulated.model.shape
    note = (
        f"{simulated.grounds.says}; one replay each, the same each time. {shape.num_layers} "
        f"layers of {shape.num_experts} experts ({human_bytes(shape.expert_nbytes)} "
        f"each{base_suffix(simulated.base)}), {shape.top_k} per token. {_ADDED}"
    )
    cells = [tuple(cell(outcome) for cell in columns.values()) for outcome in rows]
    crowd = f" to {simulated.clients.shown}" if simulated.clients else ""
    return Sheet(
        f"{simulated.source} on {simulated.machine.name}{crowd}, on virtual time",
        tuple(columns),
        cells,
        note,
    )


def _clients(simulated: Simulated) -> dict[str, Callable[[Outcome], object]]:
    """Return the columns on clients: p95 times, as numbers or over loading on demand, then bytes a
    token and experts a step, which the rows of a step share."""
    if simulated.grounds.is_absolute:
        names = {"ms to first token, p95": "ttft_p95_ms", "ms a token, p95": "tpot_p95_ms"}
        tails = {name: lambda outcome, key=key: outcome.times[key] for name, key in names.items()}
    else:
        names = {"time, p95": "tpot_p95_ms", "first token, p95": "ttft_p95_ms"}
        tails = {
            name: lambda outcome, key=key: _to(simulated.plain, key, outcome)
            for name, key in names.items()
        }

    def shared(name: str, kind: Callable[[float], object] = float) -> Callable[[Outcome], object]:
        return lambda outcome: kind(_of_clients(simulated, outcome)[name])

    return tails | {
        "bytes a token": shared("bytes_per_token", NumBytes),
        "experts a step": shared("experts_per_step"),
    }


def _absolute() -> dict[str, Callable[[Outcome], object]]:
    names = ("ms to first token", "ms a token", "tokens/s", "waiting ms in all", "near ms a token")
    return {
        name: lambda outcome, key=key: outcome.times[key]
        for name, key in zip(names, _TIMES, strict=True)
    }


def _ratios(plain: Outcome) -> dict[str, Callable[[Outcome], object]]:
    """Return the columns of times over the times of loading on demand."""
    names = {"time, on-demand = 1": "tpot_ms", "first token": "ttft_ms", "waiting": "exposed_ms"}
    return {name: lambda outcome, key=key: _to(plain, key, outcome) for name, key in names.items()}


def _to(plain: Outcome, name: str, outcome: Outcome) -> float | None:
    """Return a time over the same time of `plain`, to three digits."""
    own = outcome.times[name]
    other = plain.times[name]
    return None if own is None or not other else float(f"{own / other:.3g}")
