"""A hardware profile as tables, or as one object; imports no torch."""

from dataclasses import asdict, dataclass

from artifacts.hardware.profile import HardwareProfile, Spread
from artifacts.shape import FULL_BITS
from moectl.show.render import Sheet, human_bytes


@dataclass(frozen=True, slots=True)
class HardwareMeasurement:
    """A hardware profile, and the run of the store that holds it, None when it was not stored."""

    model: str
    profile: HardwareProfile
    run: int | None = None


def record(profile: HardwareProfile) -> dict[str, object]:
    return asdict(profile) | {"conditions": dict(profile.conditions)}


def sheets(measurement: HardwareMeasurement) -> list[Sheet]:
    """Return tables of computing, loading and near memory, in microseconds with the interquartile
    range in brackets."""
    profile = measurement.profile
    compute = [
        (step.tokens, *(_us(part) for part in (step.attention, step.moe, step.head, step.expert)))
        for step in profile.compute
    ]
    loads = [
        (
            load.link,
            _us(load.seconds),
            load.gbps,
            *(part and _us(part) for part in (load.latency, load.miss, load.host)),
        )
        for load in profile.loads
    ]
    near = [
        ("checkpoint" if cost.bits == FULL_BITS else f"{cost.bits}", cost.tokens, _us(cost.seconds))
        for cost in profile.near
    ]
    return [
        Sheet(
            "Computing, microseconds (interquartile range)",
            ("tokens", "a layer but its experts", "a layer's experts", "head", "one expert"),
            compute,
        ),
        Sheet(
            "Bringing one expert, microseconds (interquartile range)",
            (
                "link",
                "over the link",
                "GB/s",
                "latency of it",
                "a miss adds to a step",
                "the engine's work of it",
            ),
            loads,
        ),
        Sheet(
            "One expert near memory, microseconds",
            ("bits", "tokens", "on the CPU"),
            near,
            conditions(measurement),
        ),
    ]


def conditions(measurement: HardwareMeasurement) -> str:
    machine = measurement.profile.conditions
    load = "unknown" if machine["load"] is None else f"{machine['load']:.1f}"
    expert = human_bytes(machine["expert_bytes"])
    memory = human_bytes(machine["memory_nbytes"])
    kept = f"run {measurement.run}" if measurement.run is not None else "not kept"
    return (
        f"{kept}: {machine['device_name']}, {machine['cores']} cores of {machine['processor']}, "
        f"torch threads {machine['threads']}, {memory} of RAM, load before {load}; "
        f"{machine['dtype']}, experts of {expert} in "
        f"{machine.get('expert_format', machine['dtype'])}; medians of {machine['turns']}; one "
        f"token follows on {machine['context']} or more"
    )


def _us(spread: Spread) -> str:
    return f"{spread.median * 1e6:,.0f} ({spread.iqr * 1e6:,.0f})"
