"""Short measurements at the start of a session: the prefetch window, and the rates that emulate a
named machine."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from artifacts.hardware.costs import rounded_window
from artifacts.hardware.machines import Machine
from artifacts.shape import Shape
from runtime import devices
from runtime.backends.backend import Backend, StepTokens
from runtime.backends.choose import choose_backend
from runtime.backends.streams import GraphSequence, new_pool, new_stream
from runtime.control.plan import NO_SLOT, Place
from runtime.devices import made_current, wait_for_compute
from runtime.engine.engine import NAME as ENGINE
from runtime.engine.fixed_past import FixedPast, reason_not_lodged
from runtime.kernels.cpu.decoder.decoder import CompiledDecoder
from runtime.kernels.gpu.dense.decoder import TritonDecoder
from runtime.links.link import DEMAND, Link
from runtime.model.arithmetic import expert_forward
from runtime.model.layout import aligned
from runtime.model.open import MoeModel
from runtime.model.rows.passes import RowWay, one_token_each
from runtime.tiers.near import NearTier

_NO_EXPERTS = "moectl-no-experts"
_NUM_EXPERTS = 8
_ROOM = 64  # tokens, for those that are timed
_MOST_TIMED = 64  # rows: the time of more is in proportion

Seconds = Callable[[], float]  # a clock, from an arbitrary start


def wall_s() -> float:
    """Return the seconds of the wall's clock."""
    return time.perf_counter()


def _no_experts(
    module: nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return torch.zeros_like(hidden)


ALL_EXPERTS_FUNCTIONS.register(_NO_EXPERTS, _no_experts)


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of an emulated link and near tier."""

    link: float
    near: float


def scaled_rates(
    opened: MoeModel, target: Machine, *, is_fused: bool = False, clock: Seconds = wall_s
) -> Rates:
    """Return the rates at which load : compute and near : compute of one expert are those of
    `target`.

    On `target` compute reads an expert from the fast tier's memory once per token, and so takes its
    bytes over that memory's bandwidth; on this machine it is measured by `clock`, overheads
    included.
    """
    expert_s = expert_seconds(opened, is_fused=is_fused, clock=clock)
    compute = opened.shape.expert_nbytes / expert_s
    return Rates(
        compute * target.link_gbps / target.fast_gbps, compute * target.near_gbps / target.fast_gbps
    )


def scaled_window(shape: Shape, target: Machine) -> int:
    """Return the bytes that the link of `target` moves while its fast tier reads one token's
    experts of a layer, as a power of two of this model's experts. Computed and not measured, so
    that every session that emulates a machine decides alike."""
    return rounded_window(shape.top_k * target.link_gbps / target.fast_gbps, shape.expert_nbytes)


def prefetch_window(
    opened: MoeModel,
    link_bytes_per_s: float,
    *,
    is_fused: bool = False,
    dense: CompiledDecoder | TritonDecoder | None = None,
) -> int:
    """Measure the bytes that the link moves while one layer of one token is computed, as a power of
    two of experts. Fused kernels compute the experts if `is_fused`, and `dense` the modules beside
    them, if given."""
    shape = opened.shape
    experts_s = shape.top_k * expert_seconds(opened, is_fused=is_fused)
    rest_s = rest_seconds(opened, dense=dense, is_fused=is_fused)
    layer_s = rest_s / shape.num_layers + experts_s
    return rounded_window(link_bytes_per_s * layer_s / shape.expert_nbytes, shape.expert_nbytes)


def widened_window(
    opened: MoeModel, window: int, num_rows: int, way: RowWay, *, bytes_per_s: float | None
) -> int:
    """Return twice the bytes that the link moves while `num_rows` rows of one token each pass a
    layer without its experts, as a power of two of experts. The time is measured. Twice, because a
    layer's last experts are computed when all have come. `window` is the window of one token; the
    link's rate is taken from it where `bytes_per_s` is not given. `way` is that of the model."""
    timed = min(num_rows, _MOST_TIMED)
    layer_s = _body_seconds(opened, timed, way) * num_rows / timed / opened.shape.num_layers
    rate = bytes_per_s or window * opened.shape.num_layers / _body_seconds(opened, 1, way)
    return max(
        window,
        rounded_window(2 * rate * layer_s / opened.shape.expert_nbytes, opened.shape.expert_nbytes),
    )


def _body_seconds(opened: MoeModel, num_rows: int, way: RowWay) -> float:
    """Measure the seconds of the layers without routed experts, in a session: only the body of the
    model, which has its hooks, is called. Returns the fastest of a few passes, since other work of
    the machine only adds to them."""
    tokens = torch.zeros(1, num_rows, dtype=torch.int64, device=opened.model.device)
    body = opened.model.base_model
    with without_experts(opened, after=ENGINE):
        rows = one_token_each(num_rows, way)
        forward = partial(body, input_ids=tokens, position_ids=tokens, **rows.inputs())
        return min(seconds_of(lambda _: forward(), opened.model.device, warm_up=1, turns=4))


def link_bytes_per_second(
    link: Link, slots: Sequence[torch.Tensor], num_experts: int, *, num_devices: int = 1
) -> float:
    """Measure the bandwidth of a link: the median over loads of single experts into `slots`. The
    experts are those of the first layer that belong to the first device. The slots are on that
    device, have the experts' size and hold nothing yet."""
    num_keys = min(_NUM_EXPERTS, -(-num_experts // num_devices), len(slots))

    def load(turn: int) -> None:
        place = turn % num_keys
        link.collect(link.issue(place * num_devices, slots[place], urgency=DEMAND))

    seconds = _median_seconds(load, slots[0].device, warm_up=0, turns=_NUM_EXPERTS)
    link.drain_stalls()  # no compute waited for these loads
    return slots[0].nbytes / seconds


def near_bytes_per_second(opened: MoeModel, near: NearTier, backend: Backend) -> float:
    """Measure the rate at which a near tier reads experts of the first layer while `backend`
    computes one token's there; all experts take turns."""
    layer = opened.layers[0]
    top_k = opened.shape.top_k
    num_experts = opened.shape.num_experts
    device = opened.model.device
    hidden = torch.zeros(1, layer.hidden_size, dtype=opened.dtype, device=device)
    weights = torch.ones(1, top_k, dtype=opened.dtype, device=device)

    def compute(turn: int) -> None:
        experts = (turn * top_k + np.arange(top_k)[None]) % num_experts
        step = StepTokens(
            layer.experts,
            hidden,
            experts=experts,
            ids=torch.from_numpy(experts).to(device),
            router_weights=weights,
            host_weights=weights.float().cpu().numpy(),
            are_planned=False,
            are_routed=True,
        )
        places = [Place(expert, NO_SLOT) for expert in experts[0].tolist()]
        begun = backend.begin(step)
        begun.add_near(places, near, [])
        begun.finish()

    return top_k * opened.shape.expert_nbytes / _median_seconds(compute, device, turns=16)


def expert_seconds(opened: MoeModel, *, is_fused: bool = False, clock: Seconds = wall_s) -> float:
    """Measure the seconds in which torch, or fused kernels if `is_fused`, compute one resident
    expert on one token. Kernels compute all experts of a token together, from a graph where decoded
    tokens are graphs; torch computes one after another."""
    device = opened.model.device
    module = opened.layers[0].experts
    contents = _some_contents(opened)
    if is_fused:
        contents = contents[: opened.shape.top_k]
        compute = choose_backend(opened).timed_experts(opened, contents)
        work = replayed(lambda _: compute(), device)
        return _median_seconds(work, device, turns=100, clock=clock) / len(contents)
    views = [opened.store.layout.views(content) for content in contents]
    project = opened.store.layout.project
    x = torch.zeros(1, opened.layers[0].hidden_size, dtype=opened.dtype, device=device)
    return _median_seconds(
        lambda turn: expert_forward(module, views[turn % len(views)], x, project=project),
        device,
        turns=200,
        clock=clock,
    )


def _some_contents(opened: MoeModel) -> list[torch.Tensor]:
    """Return the bytes of a few experts of the first layer, uint8, on the model's device."""
    num_experts = min(_NUM_EXPERTS, opened.shape.num_experts)
    return [_content(opened, expert) for expert in range(num_experts)]


def rest_seconds(
    opened: MoeModel,
    *,
    dense: CompiledDecoder | TritonDecoder | None = None,
    is_fused: bool = False,
) -> float:
    """Measure the seconds of one decoded token without its routed experts; `dense` computes the
    modules that it knows, if given. If `is_fused`, decoded tokens are graphs where the device has
    any, and so is this one."""
    device = opened.model.device
    if dense:
        dense.install()
    try:
        with without_experts(opened):
            given = _next_token(opened, in_place=is_fused and devices.has_graphs(device))
            forward = partial(opened.model, **given)
            work = replayed(lambda _: forward(), device) if is_fused else lambda _: forward()
            return _median_seconds(work, device, warm_up=2, turns=8)
    finally:
        if dense:
            dense.uninstall()


def _next_token(opened: MoeModel, *, in_place: bool) -> dict[str, object]:
    """Return the inputs of a token; `in_place` of one that follows another, whose keys and values
    lie where a graph reads them, if the model's can."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=opened.model.device)
    given: dict[str, object] = {"input_ids": token}
    if in_place:
        with torch.no_grad():
            past = opened.model(**given, use_cache=True).past_key_values
        if reason_not_lodged(past) is None:
            fixed = FixedPast(past, _ROOM, token.device)
            fixed.count(1)
            given |= {"position_ids": token + 1, "past_key_values": fixed.cache, "use_cache": True}
    return given


def replayed(work: Callable[[int], object], device: torch.device) -> Callable[[int], object]:
    """Return a function that replays `work` as a graph, or `work` itself where the device has no
    graphs or cannot capture it: then sessions launch it too, and say so in the receipt."""
    if not devices.has_graphs(device):
        return work
    sequence = GraphSequence(new_pool())
    try:
        with torch.no_grad(), made_current(device):
            work(0)  # compiles kernels, and makes the buffers of libraries
            with sequence.capturing(new_stream(device)):
                work(0)
    except Exception:  # of the model's own code, of the driver, or of too little memory
        return work
    return lambda _: sequence.graphs[-1].replay()


@contextmanager
def without_experts(opened: MoeModel, *, after: str = "eager") -> Iterator[None]:
    """Make the model's routed experts return zeros at once; at the end they get the implementation
    `after`."""
    opened.model.set_experts_implementation(_NO_EXPERTS)
    try:
        yield
    finally:
        opened.model.set_experts_implementation(after)


def seconds_of(
    work: Callable[[int], object],
    device: torch.device,
    *,
    warm_up: int,
    turns: int,
    clock: Seconds = wall_s,
) -> list[float]:
    """Measure the seconds of each call of `work`, which gets its number, until the device is done;
    those of the warm-up are left out."""
    seconds = []
    with torch.inference_mode(), made_current(device):
        for turn in range(warm_up + turns):
            begin_s = clock()
            work(turn)
            wait_for_compute(device)
            seconds.append(clock() - begin_s)
    return seconds[warm_up:]


def _median_seconds(
    work: Callable[[int], object],
    device: torch.device,
    *,
    warm_up: int = 10,
    turns: int,
    clock: Seconds = wall_s,
) -> float:
    return statistics.median(seconds_of(work, device, warm_up=warm_up, turns=turns, clock=clock))


def _content(opened: MoeModel, expert: int) -> torch.Tensor:
    content = aligned(opened.store.layout.nbytes)
    opened.store.read(0, expert, content)
    return content.to(opened.model.device)
