"""The systems of the context-aware GPU-NDP paper on virtual time: ours, MoNDE in three readings,
and HOBBIT.

The systems that place experts migrate them before decoding. Their times per token are those of a
link without delay, as everything is there; their migration is charged whole, by its bytes over the
link.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import Machine
from artifacts.modelshapes.known import MODELS, ModelShape
from artifacts.modelshapes.memory import backbone_memory, backbone_of
from artifacts.quantisation.replicas import typical
from artifacts.shape import FULL_BITS
from artifacts.traces.synthetic import Dials, generate
from runtime.policies.presets import Scope
from runtime.replay.settings import Outcome, Setting
from runtime.replay.workload import Workload
from tools.reproductions.contextaware import figures as paper

MACHINE = "h100-cxl-ndp"
# Uses in prefill and in decoding have a cosine of .89 in this trace, as the paper reports
# (Mixtral-8x7B, TruthfulQA).
DIALS = Dials(skew=0.8, locality=0.0, similarity=0.5, tokens=2 * 448, requests=2, prompt=64)
LENGTHS = (128, 256, 512, 1024, 2048, 4096)  # decoded tokens of a request
RATES = (0.0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2)  # experts swapped in a layer and token
NUM_LAYERS = 4
STATIC = "MoNDE, same experts"
NOTHING = "MoNDE, keeps nothing"
SWAPS = "MoNDE, swaps"
HOBBIT = "HOBBIT"
HOBBIT_BEST = "HOBBIT, no prefetching"  # which costs it time on this machine


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a whole model: of a prompt, of the migration after it, of a decoded token, and the
    NDP's part of a decoded token."""

    ttft_s: float
    migration_s: float
    token_s: float
    near_s: float

    def request_s(self, num_tokens: int) -> float:
        """Return the seconds of a request with n = `num_tokens` decoded tokens.

        They are TTFT + migration + n * TPOT.
        """
        return self.ttft_s + self.migration_s + num_tokens * self.token_s


@dataclass(frozen=True, slots=True)
class Measured:
    """One model: our system by average bits, its rivals by name, MoNDE by swap rate, and the rate
    at which our throughput at 3 bits over MoNDE is the printed one. `swapping` is a system that
    swaps at that rate beside experts as ours places them, by average bits, 16 included."""

    ours: dict[int, Timed]
    rivals: dict[str, Timed]
    by_rate: dict[float, Timed]
    rate: float
    swapping: dict[int, Timed]

    def decoding(self, bits: int, rival: Timed) -> float:
        return rival.token_s / self.ours[bits].token_s

    def near(self, bits: int, rival: Timed) -> float:
        return rival.near_s / self.ours[bits].near_s

    def end_to_end(self, bits: int, rival: Timed, num_tokens: int) -> float:
        return rival.request_s(num_tokens) / self.ours[bits].request_s(num_tokens)


def layers_of(name: str) -> ModelShape:
    """A model cut to a few layers, with a proportional share of its head."""
    model = MODELS[name]
    vocabulary = round(model.vocabulary * NUM_LAYERS / model.shape.num_layers)
    return replace(model, shape=replace(model.shape, num_layers=NUM_LAYERS), vocabulary=vocabulary)


def measure(name: str, device: Machine, seed: int = 0) -> Measured:
    """Replay one trace through every system, with the paper's number of hot experts a layer."""
    model = layers_of(name)
    budget = f"{paper.HOT[name] * NUM_LAYERS}x"
    trace = generate(replace(DIALS, seed=seed), model.shape)
    here, at_once = (
        Workload(trace, model, one) for one in (device, replace(device, link_gbps=math.inf))
    )
    times = MODELS[name].shape.num_layers / NUM_LAYERS

    def timed(setting: Setting) -> Timed:
        return _timed(here.run(setting), times)

    def placed(preset: str, residency: str) -> Timed:
        setting = Setting(
            preset, preset, {"residency": f"{residency}migrate=before"}, budget=budget
        )
        first = here.run(setting)
        after = at_once.run(setting)
        moved_s = first.counters["prefetch_bytes"] / DIALS.requests / (device.link_gbps * 1e9)
        return replace(
            _timed(after, times), ttft_s=_timed(first, times).ttft_s, migration_s=moved_s * times
        )

    def swapping(rate: float) -> Timed:
        return timed(Setting(SWAPS, "monde", {"miss": f"cold:swap={rate:.4f}"}, budget=budget))

    ours = {bits: placed("context-aware", f"hot:avg_bits={bits},") for bits in paper.BITS}
    by_rate = {rate: swapping(rate) for rate in RATES}
    rate = fitted_rate(name, ours[3], by_rate)
    rivals = {
        STATIC: placed("monde-static", "hot:"),
        NOTHING: timed(keeping_nothing(device)),
        SWAPS: swapping(rate),
        HOBBIT: timed(Setting(HOBBIT, "hobbit", budget=budget)),
        HOBBIT_BEST: timed(Setting(HOBBIT_BEST, "hobbit", {"prefetch": "none"}, budget=budget)),
    }
    swaps = {"miss": f"cold:swap={rate:.4f}"}
    placed_bits = {
        bits: timed(
            Setting(
                SWAPS,
                "monde",
                swaps | {"residency": f"hot:avg_bits={bits},migrate=before"},
                budget=budget,
            )
        )
        for bits in (3, FULL_BITS)
    }
    return Measured(ours, rivals, by_rate, rate, placed_bits)


def keeping_nothing(device: Machine) -> Setting:
    """MoNDE as published: it fetches the experts of a step that arrive while the near tier computes
    the others."""
    miss = f"qstar:ratio={device.link_gbps / device.near_gbps:.4f}"
    return Setting(NOTHING, policies={"miss": miss}, scope=Scope.GLOBAL, budget="2x")


def fitted_rate(name: str, ours: Timed, by_rate: dict[float, Timed]) -> float:
    """Return the swap rate at which MoNDE's time per token over ours is the ratio that the paper
    prints for 3 bits.

    It is read off the straight line between the two rates beside it.
    """
    ratios = [one.token_s / ours.token_s for one in by_rate.values()]
    return round(float(np.interp(paper.DECODING[name, 3].low, ratios, list(by_rate))), 4)


def _timed(outcome: Outcome, times: float) -> Timed:
    """Return the times of the whole model, from a replayed trace of fewer layers."""
    ttft, token, near = (
        outcome.times[name] * times / 1e3 for name in ("ttft_ms", "tpot_ms", "near_ms")
    )
    return Timed(ttft, 0.0, token, near)


def cold_expert(device: Machine, bits: int) -> float:
    """Time of one expert on the near tier at full precision over its time at `bits`, for one
    token."""
    model = MODELS[paper.SMALL]
    nbytes = typical(np.ones((1, 1)), expert_nbytes=model.shape.expert_nbytes).nbytes
    near = Costs.of(model, device).near
    return near.seconds(1) / near.seconds(1, share=nbytes[bits] / nbytes[FULL_BITS])


def gpu_gb(name: str, num_hot: int) -> float:
    """Return the GB of GPU memory for `num_hot` hot experts a layer in FP16 and all other weights,
    without a cache."""
    model = MODELS[name]
    others = backbone_memory(model, backbone_of(name)).weights_nbytes
    return (num_hot * model.shape.num_layers * model.shape.expert_nbytes + others) / 1e9
