"""Checks a hardware profile: compares a short live run with a simulation of its trace at the
measured costs."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from artifacts.hardware.profile import HardwareProfile
from artifacts.modelshapes.known import guessed
from artifacts.traces.trace import Trace
from profilers.compare.quality import TextReading, read
from profilers.hardware.load_times import TimingEffort
from profilers.hardware.profile import layer_seconds
from runtime.control.counters import hit_rate
from runtime.engine.engine import NAME
from runtime.model.open import MoeModel
from runtime.replay.measured_machine import costs_of, machine_of
from runtime.replay.settings import Outcome, Setting
from runtime.replay.workload import Workload
from runtime.session.session import Session, Settings

PRESET = "on-demand"
_TIMES = 3
_BETWEEN = TimingEffort(turns=4)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Milliseconds per decoded token and of stall, predicted and measured; `ratio` is predicted
    over measured. There is one `hit_rate`, since live and simulated runs agree on every counter.

    `pace` is the time of a layer without its experts during the runs, over the same time in the
    profile. It shows the other work on the machine; `ratio_at_pace` is the ratio with the
    prediction scaled by it.
    """

    preset: str
    budget: str
    link: str
    tokens: int
    hit_rate: float
    predicted_ms: float
    measured_ms: float
    ratio: float
    pace: float
    ratio_at_pace: float
    predicted_stall_ms: float
    measured_stall_ms: float


def check(
    opened: MoeModel,
    profile: HardwareProfile,
    sequences: Sequence[np.ndarray],
    *,
    prefill: int,
    budget: str = "25%",
    link: str = "auto",
) -> Prediction:
    """Decode the end of each sequence on demand at a budget, from an empty cache, and predict that
    run from its trace.

    `link` is as for a run, and must be among the loads of the profile (BadInput). A token's time is
    its median over three runs, because other work may delay one of them.
    """
    settings = Settings(PRESET, budget=budget, link=link)
    runs = []
    bare_s = []
    for _ in range(_TIMES):
        with Session(opened, settings) as session:
            readings = []
            for sequence in sequences:
                readings.append(read(session, [sequence], prefill=prefill))
                bare_s.append(layer_seconds(opened, 1, _BETWEEN, after=NAME).median)
        runs.append(readings)
    trace, counters = _traced(opened, settings, sequences, prefill)
    outcome = _simulated(opened, profile, trace, budget)
    assert {name: outcome.counters[name] for name in ("hits", "misses")} == {
        name: counters[name] for name in ("hits", "misses")
    }, (outcome.counters, counters)
    pace = statistics.median(bare_s) / profile.decode.attention.median
    return _prediction(profile, outcome, budget, runs, pace)


def _traced(
    opened: MoeModel, settings: Settings, sequences: Sequence[np.ndarray], prefill: int
) -> tuple[Trace, dict[str, int]]:
    """Repeat the run with a recorder, untimed because recording takes time. Returns its trace and
    counters."""
    with Session(opened, settings) as session:
        recorder = session.record()
        read(session, sequences, prefill=prefill)
        return recorder.trace(), session.controller.counters.totals()


def _simulated(opened: MoeModel, profile: HardwareProfile, trace: Trace, budget: str) -> Outcome:
    shape = opened.shape
    # only its shape counts: the costs are measured
    model = replace(guessed(shape), name="measured", assumed=())
    machine = machine_of(profile, shape)
    return Workload(trace, model, machine, costs=costs_of(profile, shape)).run(
        Setting(PRESET, PRESET, budget=budget)
    )


def _prediction(
    profile: HardwareProfile,
    outcome: Outcome,
    budget: str,
    runs: Sequence[Sequence[TextReading]],
    pace: float,
) -> Prediction:
    seconds = [
        [token_s for reading in readings for token_s in reading.decode_s] for readings in runs
    ]
    stalls = [[token_s for reading in readings for token_s in reading.stall_s] for readings in runs]
    measured_ms = _mean_ms(seconds)
    predicted_ms = outcome.times["tpot_ms"]
    num_tokens = len(seconds[0])
    return Prediction(
        preset=PRESET,
        budget=budget,
        link=str(profile.conditions["link"]),
        tokens=num_tokens,
        hit_rate=hit_rate(outcome.counters),
        predicted_ms=predicted_ms,
        measured_ms=measured_ms,
        ratio=predicted_ms / measured_ms,
        pace=pace,
        ratio_at_pace=predicted_ms * pace / measured_ms,
        predicted_stall_ms=outcome.times["exposed_ms"] / num_tokens,
        measured_stall_ms=_mean_ms(stalls),
    )


def _mean_ms(runs: Sequence[Sequence[float]]) -> float:
    """Return the mean over the tokens of each token's median over the runs."""
    return statistics.fmean(map(statistics.median, zip(*runs, strict=True))) * 1e3
