"""Rates at which this machine has the shape of a named one: one expert's load and near compute, each over its compute."""

import statistics
import time
from dataclasses import dataclass

import torch

from artifacts.hardware import Machine
from runtime.experts import expert_forward
from runtime.model import MoeModel
from runtime.weights import aligned

_WARM_UP, _TURNS, _NUM_EXPERTS = 10, 50, 8


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of an emulated link and near tier."""

    link: float
    near: float


def scaled_rates(opened: MoeModel, target: Machine) -> Rates:
    """Rates for which load : compute and near : compute of one expert are those of `target`.

    There an expert is read from the fast tier's memory once per token, so that its compute takes its bytes over that
    memory's bandwidth; here its compute is measured, overheads included.
    """
    here = opened.shape.expert_nbytes / expert_seconds(opened)
    return Rates(here * target.link_gbps / target.fast_gbps, here * target.near_gbps / target.fast_gbps)


def expert_seconds(opened: MoeModel) -> float:
    """Seconds of one expert on one token in the fast tier: the median of 50, over experts that take turns."""
    device, module = opened.model.device, opened.layers[0].experts
    views = [opened.store.layout.views(_on(device, opened, expert)) for expert in range(_num_experts(opened))]
    x = torch.zeros(1, opened.config.hidden_size, dtype=opened.store.layout.dtype, device=device)
    seconds = []
    with torch.inference_mode():
        for turn in range(_WARM_UP + _TURNS):
            begin_s = time.perf_counter()
            expert_forward(module, views[turn % len(views)], x)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds[_WARM_UP:])


def _num_experts(opened: MoeModel) -> int:
    return min(_NUM_EXPERTS, opened.shape.num_experts)


def _on(device: torch.device, opened: MoeModel, expert: int) -> torch.Tensor:
    host = aligned(opened.store.layout.nbytes)
    opened.store.read(0, expert, host)
    return host if device.type == "cpu" else host.to(device)
