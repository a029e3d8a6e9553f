"""Microseconds of one decision: `Controller.step` with its prefetches, by preset.

    python -m tools.bench.traces.controller
    python -m tools.bench.traces.controller --preset near horizon --profile
    python -m tools.bench.traces.controller --model qwen3-30b-a3b --passes 100

Decode steps of one token in the shape of a model, by default 16 layers of 64 experts, 8 selected,
at a budget of 25 %, with predictions. Artefacts of policies are built from the same trace; maps
begin empty. Times are CPU times without the first third of the steps. The search for maps, which a
run does on a thread while a layer is computed, is done between the steps and listed apart, as is
what a policy decides before a pass, its search by embedding included.
"""

import argparse
import cProfile
import pstats
import time
from dataclasses import dataclass, replace

import numpy as np

from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import MODELS, ModelShape
from artifacts.routing.expert_maps import ExpertMaps
from artifacts.routing.predictors import RECORDED
from artifacts.shape import Shape
from artifacts.traces.trace import DECODE, Trace
from moectl.show.render import Sheet, show_sheet
from runtime.control.build import build_controller, fast_tier
from runtime.control.controller import Controller
from runtime.control.plan import Place, Plan
from runtime.policies.base import Artefacts, Step
from runtime.policies.presets import Scope, preset
from runtime.policies.shared.maps import Matching
from runtime.policies.step import Opening
from runtime.replay.replay import replay
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload
from tools.arguments import parser_of

LOSSLESS = (
    "on-demand",
    "near",
    "mixtral-offloading",
    "moe-infinity",
    "promoe",
    "specmd",
    "monde-static",
    "moepic",
    "fmoe",
    "horizon",
    "foresight",
)
TUNED = "tuned"  # found by `moectl tune` at 25 %
_TUNED = {
    "prefetch": "next_gate:distance=2,overfetch=0.5,through=yes",
    "eviction": "horizon",
    "miss": "near:ratio=0.312",
}
OLMOE: ModelShape = MODELS["olmoe-1b-7b"]
_HIDDEN = 64
_DISTANCE = 3
# of an expert a layer
_MACHINE = "rtx3090-pcie4"
_BUDGET = "25%"
_WINDOW = 0.5


def main() -> None:
    options = _options()
    model = MODELS[options.model]
    rows = []
    trace = foreseeing(options.passes, model)
    for name in options.preset:
        owner, matching = controller(name, trace, model)
        if options.profile:
            profile(name, trace, owner)
            continue
        found = timed(trace, owner, matching)
        rows.append((name, *quartiles(found.steps_us)))
        if found.openings_us:
            rows.append((f"{name}: before a pass", *quartiles(found.openings_us)))
        if found.searches_us:
            rows.append((f"{name}: its search", *quartiles(found.searches_us)))
    if rows:
        shape = model.shape
        experts = f"{shape.top_k} of {shape.num_experts} experts, budget {_BUDGET}"
        title = f"{len(trace):,} steps of one token, {shape.num_layers} layers, {experts}"
        show_sheet(
            Sheet(title, ("preset", "us a step, 1st quartile", "median", "3rd quartile"), rows, "")
        )


def synthetic(shape: Shape, num_passes: int, *, seed: int = 0) -> Trace:
    """A synthetic trace of the decode passes of one request, each selection leaning on the one before
    and on a popularity of its layer."""
    rng = np.random.default_rng(seed)
    popularity = rng.normal(size=(shape.num_layers, shape.num_experts))
    taste = np.zeros_like(popularity)
    experts = np.empty((num_passes, shape.num_layers, shape.top_k), np.uint16)
    for selected in experts:
        taste = 0.9 * taste + 0.5 * rng.normal(size=taste.shape)
        logits = popularity + taste + 0.5 * rng.normal(size=taste.shape)
        selected[:] = np.argsort(-logits, axis=1)[:, : shape.top_k]
    size = num_passes * shape.num_layers
    return Trace(
        request=np.zeros(size, np.int32),
        pass_=np.repeat(np.arange(num_passes, dtype=np.int32), shape.num_layers),
        phase=np.full(size, DECODE, np.uint8),
        layer=np.tile(np.arange(shape.num_layers, dtype=np.int32), num_passes),
        token=np.repeat(np.arange(num_passes, dtype=np.int32), shape.num_layers),
        experts=experts.reshape(size, shape.top_k),
        weights=np.full((size, shape.top_k), 1 / shape.top_k, np.float32),
        probabilities=np.full((size, shape.num_experts), 1 / shape.num_experts, np.float32),
    )


def foreseeing(num_passes: int, model: ModelShape = OLMOE, *, seed: int = 0) -> Trace:
    """A synthetic trace with noisy predictions and an embedding a pass."""
    shape = model.shape
    rng = np.random.default_rng(seed)
    trace = synthetic(shape, num_passes, seed=seed)
    logits = rng.normal(size=(len(trace), shape.num_experts))
    np.put_along_axis(logits, trace.experts.astype(np.int64), 2.0, axis=1)
    said = np.exp(logits).astype(np.float32)
    said /= said.sum(axis=1, keepdims=True)
    ahead = np.stack(
        [np.roll(said, -distance, axis=0) for distance in range(1, _DISTANCE + 1)], axis=1
    )
    return replace(
        trace,
        probabilities=said,
        predicted=ahead,
        learned=ahead,
        iteration=np.repeat(np.arange(num_passes, dtype=np.int32), shape.num_layers),
        embeddings=rng.normal(size=(num_passes, _HIDDEN)).astype(np.float32),
    )


def controller(
    name: str, trace: Trace, model: ModelShape = OLMOE
) -> tuple[Controller, Matching | None]:
    """The controller of a preset, and its matcher of maps if it has one."""
    setting = (
        Setting(name, policies=_TUNED, scope="global") if name == TUNED else Setting(name, name)
    )
    setting, policies, shape = replace(setting, budget=_BUDGET), setting.build(), model.shape
    known = Artefacts(
        predictors=RECORDED,
        maps=ExpertMaps.empty(
            num_layers=shape.num_layers, num_experts=shape.num_experts, hidden=_HIDDEN
        ),
        learns_maps=True,
    )
    if "splits" in policies.wants:
        known = replace(known, splits=(Workload(trace, model, machine(_MACHINE)).solved(setting),))
    scope = Scope(setting.scope or preset(setting.preset).scope)
    fast = fast_tier(policies, shape, _BUDGET, scope=scope, artefacts=known, machine=_MACHINE)
    owner = build_controller(
        policies,
        shape,
        num_slots=fast.num_slots,
        split=fast.split,
        scope=scope,
        window=round(_WINDOW * shape.expert_nbytes),
        artefacts=known,
    )
    return owner, policies.matching


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of each step, of what is decided before each pass, if anything is, and of the
    search for maps between the steps, if any."""

    steps_us: list[float]
    openings_us: list[float]
    searches_us: list[float]


def timed(trace: Trace, owner: Controller, matching: Matching | None) -> Times:
    """Time a replay step by step."""
    decide = owner.step
    begin = owner.open_pass
    found = Times([], [], [])

    def open_pass(opening: Opening) -> tuple[Place, ...]:
        begin_s = time.thread_time()
        brought = begin(opening)
        found.openings_us.append((time.thread_time() - begin_s) * 1e6)
        return brought

    def step(one: Step) -> Plan:
        begin_s = time.thread_time()
        plan = decide(one)
        decided_s = time.thread_time()
        found.steps_us.append((decided_s - begin_s) * 1e6)
        if matching:
            matching.catch_up()
            found.searches_us.append((time.thread_time() - decided_s) * 1e6)
        return plan

    owner.step = step
    owner.open_pass = open_pass
    replay(trace, owner)
    return found


def profile(name: str, trace: Trace, owner: Controller) -> None:
    """Profile a replay by function."""
    profiler = cProfile.Profile()
    profiler.runcall(replay, trace, owner)
    print(name)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def quartiles(times_us: list[float]) -> list[str]:
    """Quartiles without the first third, in which the tier fills and code is loaded."""
    return [f"{us:.1f}" for us in np.percentile(times_us[len(times_us) // 3 :], [25, 50, 75])]


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        passes=(300, "of the synthetic trace"),
        profile=(False, "say where the time goes instead"),
    )
    parser.add_argument(
        "--preset", nargs="+", default=[*LOSSLESS, TUNED], choices=[*LOSSLESS, TUNED]
    )
    parser.add_argument(
        "--model", default=OLMOE.name, choices=MODELS, help="whose shape the trace has"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
