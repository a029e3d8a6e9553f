"""Short measurements at the start of a session: what a prefetch may spend, and how a named machine is emulated."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from artifacts.hardware.costs import rounded_window
from artifacts.hardware.machines import Machine
from artifacts.shape import Shape
from runtime.engine.output import choose_output
from runtime.kernels.cpu.dense import CompiledLinear
from runtime.links.link import DEMAND, Link
from runtime.model.arithmetic import expert_forward
from runtime.model.layout import aligned
from runtime.model.open import MoeModel

_NO_EXPERTS = "moectl-no-experts"
_NUM_EXPERTS = 8


def _no_experts(module: nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(hidden)


ALL_EXPERTS_FUNCTIONS.register(_NO_EXPERTS, _no_experts)


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of an emulated link and near tier."""

    link: float
    near: float


def scaled_rates(opened: MoeModel, target: Machine, *, is_fused: bool = False) -> Rates:
    """Rates for which load : compute and near : compute of one expert are those of `target`.

    There an expert is read from the fast tier's memory once per token, so that its compute takes its bytes over that
    memory's bandwidth; here its compute is measured, overheads included.
    """
    here = opened.shape.expert_nbytes / expert_seconds(opened, is_fused=is_fused)
    return Rates(here * target.link_gbps / target.fast_gbps, here * target.near_gbps / target.fast_gbps)


def scaled_window(shape: Shape, target: Machine) -> int:
    """What the link of `target` moves while its fast tier reads one token's experts of a layer, in bytes here.

    Not measured, so that a session that emulates a machine decides alike every time.
    """
    return rounded_window(shape.top_k * target.link_gbps / target.fast_gbps, shape.expert_nbytes)


def prefetch_window(
    opened: MoeModel, link_bytes_per_s: float, *, is_fused: bool = False, dense: CompiledLinear | None = None
) -> int:
    """Bytes that the link moves while one layer of one token is computed, as a power of two of experts. `is_fused` are
    the experts, `dense` computes the linear layers beside them if torch does not."""
    shape = opened.shape
    experts_s = shape.top_k * expert_seconds(opened, is_fused=is_fused)
    layer_s = rest_seconds(opened, dense=dense) / shape.num_layers + experts_s
    return rounded_window(link_bytes_per_s * layer_s / shape.expert_nbytes, shape.expert_nbytes)


def link_bytes_per_second(
    link: Link, slots: Sequence[torch.Tensor], num_experts: int, *, num_devices: int = 1
) -> float:
    """What a link moves: the median over single experts of the first layer that belong to the first device, brought
    into `slots` there, as large as they are, that nobody uses yet."""
    num_keys = min(_NUM_EXPERTS, -(-num_experts // num_devices), len(slots))

    def bring(turn: int) -> None:
        own = turn % num_keys
        link.collect(link.issue(own * num_devices, slots[own], urgency=DEMAND))

    seconds = _median_seconds(bring, slots[0].device, warm_up=0, turns=_NUM_EXPERTS)
    link.drain_stalls()  # nobody's compute waited
    return slots[0].nbytes / seconds


def expert_seconds(opened: MoeModel, *, is_fused: bool = False) -> float:
    """Seconds of one expert on one token in the fast tier, as torch or fused code computes it, over experts that take
    turns."""
    device, module, contents = opened.model.device, opened.layers[0].experts, some_contents(opened)
    if is_fused:
        return _median_seconds(choose_output(opened).timed_expert(opened, contents), device, turns=200)
    views, project = [opened.store.layout.views(content) for content in contents], opened.store.layout.project
    x = torch.zeros(1, opened.config.hidden_size, dtype=opened.dtype, device=device)
    return _median_seconds(
        lambda turn: expert_forward(module, views[turn % len(views)], x, project=project), device, turns=200
    )


def some_contents(opened: MoeModel) -> list[torch.Tensor]:
    """A few experts of the first layer in the fast tier, as bytes, uint8."""
    num_experts = min(_NUM_EXPERTS, opened.shape.num_experts)
    return [_on(opened.model.device, opened, expert) for expert in range(num_experts)]


def rest_seconds(opened: MoeModel, *, dense: CompiledLinear | None = None) -> float:
    """Seconds of one decoded token without its routed experts."""
    model = opened.model
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    if dense:
        dense.install()
    try:
        with without_experts(opened):
            return _median_seconds(lambda _: model(input_ids=token), model.device, warm_up=2, turns=8)
    finally:
        if dense:
            dense.uninstall()


@contextmanager
def without_experts(opened: MoeModel, *, after: str = "eager") -> Iterator[None]:
    """The model's routed experts answer zero at once; then they are implemented as `after` says."""
    opened.model.set_experts_implementation(_NO_EXPERTS)
    try:
        yield
    finally:
        opened.model.set_experts_implementation(after)


def seconds_of(work: Callable[[int], object], device: torch.device, *, warm_up: int, turns: int) -> list[float]:
    """Seconds of each turn of `work`, which is told its number, until the device has done it; not of the warm-up."""
    seconds = []
    with torch.inference_mode():
        for turn in range(warm_up + turns):
            begin_s = time.perf_counter()
            work(turn)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            seconds.append(time.perf_counter() - begin_s)
    return seconds[warm_up:]


def _median_seconds(
    work: Callable[[int], object], device: torch.device, *, warm_up: int = 10, turns: int = 50
) -> float:
    return statistics.median(seconds_of(work, device, warm_up=warm_up, turns=turns))


def _on(device: torch.device, opened: MoeModel, expert: int) -> torch.Tensor:
    host = aligned(opened.store.layout.nbytes)
    opened.store.read(0, expert, host)
    return host if device.type == "cpu" else host.to(device)
