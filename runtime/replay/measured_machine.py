"""A measured machine as the simulator takes machines: measurements in place of data sheets."""

from dataclasses import replace

from artifacts.hardware.costs import Costs, Work
from artifacts.hardware.machines import HERE, Machine
from artifacts.hardware.profile import (
    COLD,
    DISK,
    EACH_LOAD,
    NAMED_LINKS,
    PAGEABLE,
    RAM,
    HardwareProfile,
    Load,
)
from artifacts.shape import Shape
from runtime.control import sizes


def costs_of(profile: HardwareProfile, shape: Shape, *, link: str | None = None) -> Costs:
    """Return the costs of the measured model, with loads over `link`, by default the profile's own.

    A step whose experts are resident takes as long as it did when measured: the engine's work per
    step counts with the rest of the layer, its work per load with the load. Raises BadInput for a
    link that was not measured.
    """
    single = profile.decode
    many = profile.compute[-1]
    # A layer's expert time is a difference between passes, which other work on the machine can make
    # zero or negative.
    expert_s = (
        min(single.expert.median, single.moe.median / shape.top_k)
        if single.moe.median > 0
        else single.expert.median
    )
    engine_s = max(0.0, single.moe.median - shape.top_k * expert_s)
    near = profile.near_at()
    near_work = Work(near[0].seconds.median, near[-1].seconds.median / near[-1].tokens)
    # on the thread that computes, so that neither overlaps the other
    computes_near = profile.device == "cpu"
    costs = Costs(
        expert=Work(expert_s, many.expert.median / many.tokens),
        load_s=0.0,
        load_latency_s=0.0,
        near=Work(0.0) if computes_near else near_work,
        rest=Work(
            single.attention.median + engine_s, (many.attention.median + engine_s) / many.tokens
        ),
        head=Work(single.head.median, many.head.median / many.tokens),
        near_host=near_work if computes_near else Work(0.0),
        deciding=profile.deciding,
    )
    load = profile.load(link)
    if load.link not in NAMED_LINKS:
        copy_s = next(
            (single.seconds.median for single in profile.loads if single.link in (RAM, PAGEABLE)),
            0.0,
        )
        return _over_rate(costs, load, shape, copy_s)
    latency_s = min(max(0.0, load.latency.median), load.seconds.median) if load.latency else 0.0
    return replace(
        costs,
        load_s=load.seconds.median - latency_s,
        load_latency_s=latency_s,
        host_s=_host_seconds(load),
        reads_whole=load.link in (DISK, COLD),
    )


def _over_rate(costs: Costs, load: Load, shape: Shape, copy_s: float) -> Costs:
    """Return costs with loads over an emulated link. The link keeps its rate exactly; besides,
    compute copies what arrives while the link goes on, and waits end late."""
    bandwidth, latency_s = sizes.rate(load.link)
    load_s = shape.expert_nbytes / bandwidth
    left_s = _host_seconds(load)
    host_s = min(left_s, costs.deciding.get(EACH_LOAD, 0.0))
    copy_s = min(left_s - host_s, copy_s)
    return replace(
        costs,
        load_s=load_s,
        load_latency_s=latency_s,
        host_s=host_s,
        copy_s=copy_s,
        demand_s=left_s - host_s - copy_s,
        wake_s=max(0.0, load.seconds.median - max(load_s + latency_s, copy_s)),
    )


def _host_seconds(load: Load) -> float:
    """Return the host's seconds per load. For a profile without them, it is the time of a miss less
    the time of its load."""
    if load.host is not None:
        return max(0.0, load.host.median)
    return 0.0 if load.miss is None else max(0.0, load.miss.median - load.seconds.median)


def machine_of(profile: HardwareProfile, shape: Shape, *, link: str | None = None) -> Machine:
    """Return the same costs as bandwidths: one expert's bytes over its seconds. Arithmetic is not
    measured apart from memory, so that peak arithmetic is infinite."""
    costs = costs_of(profile, shape, link=link)
    nbytes = shape.expert_nbytes / 1e9
    return Machine(
        HERE,
        fast_gbps=nbytes / costs.expert.memory_s,
        fast_tflops=float("inf"),
        link_gbps=nbytes / (costs.load_s + costs.load_latency_s),
        link_latency_s=0.0,
        near_gbps=nbytes / max(costs.near.memory_s, costs.near_host.memory_s),
        source=f"measured: {profile.conditions['device_name']}",
    )
