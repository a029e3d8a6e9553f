"""Replay speed of every eviction policy, and the time of one decision in a live decode step.

    python -m tools.bench.traces.simulator
    python -m tools.bench.traces.simulator --eviction lru horizon --live
    python -m tools.bench.traces.simulator --eviction lru --profile

Without `--trace` the trace is synthetic: decode passes of one token over 16 layers of 64 experts, 8
selected, each selection leaning on the one before and on a popularity of its layer. Times are of
the processor, and those of the fastest round: other load of the machine only makes a round slower.
`us/step` is of steps laid ready, one after another, as warm as caches get; `--live` adds the median
of what the controller takes between the layers of a real decode, where everything else that a model
does has been through the caches.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from pathlib import Path

import numpy as np

from artifacts.shape import Shape
from artifacts.traces.next_use import NextUse
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import DECODE, Trace
from moectl.show.render import Sheet, show_sheet
from runtime.control.build import build_controller
from runtime.control.controller import Controller
from runtime.control.plan import Plan
from runtime.policies import POLICIES, build
from runtime.policies.base import Artefacts, Step
from runtime.policies.presets import Scope, preset
from runtime.replay.replay import replay
from tools.arguments import parser_of

SHAPE = Shape(num_layers=16, num_experts=64, top_k=8, expert_nbytes=1)
# The policies that need nothing but a trace.
EVICTIONS = [
    name for name, policy in POLICIES["eviction"].items() if policy.requires <= {"next_use"}
]


def main() -> None:
    options = _options()
    trace, shape = (
        _read(options.trace, options.num_experts)
        if options.trace
        else (synthetic(SHAPE, options.passes), SHAPE)
    )
    if options.profile:
        for name in options.eviction:
            profile(name, trace, controller(trace, shape, name, options))
        return
    rows = [(name, *measure(trace, shape, name, options)) for name in options.eviction]
    lru = {name: rate for name, rate, _ in rows}.get("lru", rows[0][1])
    live = [(_live(name, options),) if options.live else () for name in options.eviction]
    show_sheet(
        Sheet(
            (
                f"{len(trace):,} steps, {shape.num_keys} keys, budget {options.budget:.0%}, scope "
                f"{options.scope}"
            ),
            (
                "eviction",
                "requests/s",
                "of lru",
                "us/step, laid ready",
                *["us/step, live"] * options.live,
            ),
            [
                (name, f"{rate:,.0f}", f"{rate / lru:.2f}", f"{us:.1f}", *more)
                for (name, rate, us), more in zip(rows, live, strict=True)
            ],
            (
                f"{shape.top_k} of {shape.num_experts} experts a step; requests/s: the best of "
                f"{options.rounds} replays"
            )
            + (
                "; live: the bundled model, 4 of 32 experts, one token a pass, one thread"
                if options.live
                else ""
            ),
        )
    )


def synthetic(shape: Shape, num_passes: int, *, seed: int = 0) -> Trace:
    """A synthetic trace of the decode passes of one request."""
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


def measure(
    trace: Trace, shape: Shape, eviction: str, options: argparse.Namespace
) -> tuple[float, float]:
    """Requests per second of a replay, and microseconds of a controller's step by itself; the best
    round of each."""
    rates = []
    steps_us = []
    for _ in range(options.rounds):
        owner = controller(trace, shape, eviction, options)
        start = time.process_time()
        replay(trace, owner)
        rates.append(owner.counters.totals()["requests"] / (time.process_time() - start))
        steps_us.append(_step_us(trace, controller(trace, shape, eviction, options)))
    return max(rates), min(steps_us)


def controller(
    trace: Trace, shape: Shape, eviction: str, options: argparse.Namespace
) -> Controller:
    policies = build(preset("on-demand").texts() | {"eviction": eviction})
    return build_controller(
        policies,
        shape,
        num_slots=round(shape.num_keys * options.budget),
        scope=Scope(options.scope),
        window=0,
        artefacts=Artefacts(
            next_use=NextUse.of(trace, shape) if "next_use" in policies.requires else None
        ),
    )


def profile(name: str, trace: Trace, owner: Controller) -> None:
    """Profile a replay by function."""
    profiler = cProfile.Profile()
    profiler.runcall(replay, trace, owner)
    print(name)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def _live(eviction: str, options: argparse.Namespace) -> str | None:
    """Live microseconds of a policy; None for an oracle."""
    needs_future = "next_use" in POLICIES["eviction"][eviction].requires
    return None if needs_future else f"{live_us(eviction, options):.1f}"


def live_us(eviction: str, options: argparse.Namespace, *, num_tokens: int = 96) -> float:
    """Median microseconds of a controller's step while the bundled model decodes, its first tokens
    left out."""
    import torch

    from moectl.bundled import demo_model
    from runtime.session.generation.sampling import Sampling
    from runtime.session.session import Session, Settings

    session = Session.open(
        str(demo_model()),
        Settings(
            policies={"eviction": eviction},
            scope=options.scope,
            budget=f"{options.budget:%}",
            threads=1,
        ),
    )
    decide = session.controller.step
    seconds = []

    def timed(step: Step) -> Plan:
        start = time.perf_counter()
        plan = decide(step)
        seconds.append(time.perf_counter() - start)
        return plan

    session.controller.step = timed
    prompt = torch.arange(100, 132)[None]
    with session:
        for _ in session.generate(prompt, Sampling(max_new_tokens=num_tokens, ignore_eos=True)):
            pass
    return statistics.median(seconds[len(seconds) // 3 :]) * 1e6


def _step_us(trace: Trace, owner: Controller) -> float:
    """Microseconds of a step in the second half of the trace, when the cache is full; steps are
    prepared beforehand."""
    taken = [
        Step(s.pass_index, s.phase, s.layer, s.experts.astype(np.int64), s.weights, s.probabilities)
        for s in trace.steps()
    ]
    elapsed = 0.0
    pass_index = -1
    half = len(taken) // 2
    for number, step in enumerate(taken):
        if step.pass_index != pass_index:
            pass_index = step.pass_index
            owner.begin_pass(len(step.selected))
        start = time.process_time()
        owner.step(step)
        elapsed += (time.process_time() - start) * (number >= half)
    return elapsed / (len(taken) - half) * 1e6


def _read(path: Path, num_experts: int) -> tuple[Trace, Shape]:
    trace = read_parquet(path, num_experts=num_experts)
    return trace, Shape(trace.num_layers, num_experts, trace.experts.shape[1], 1)


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        trace=(Path, "a Parquet trace instead of the synthetic one"),
        num_experts=(32, "of each layer of that trace"),
        passes=(1000, "of the synthetic trace"),
        budget=(0.25, "share of all keys that fit"),
        rounds=3,
        live=(False, "also time steps in a decode of the bundled model"),
        profile=(False, "say where the time goes instead"),
    )
    parser.add_argument("--eviction", nargs="+", default=EVICTIONS, choices=EVICTIONS)
    parser.add_argument("--scope", default="global", choices=list(Scope))
    return parser.parse_args()


if __name__ == "__main__":
    main()
