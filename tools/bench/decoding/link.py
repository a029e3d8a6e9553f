"""Decoding over an emulated link: milliseconds of a live token beside a simulation of the same
trace.

A section of tools.bench.decode. In each round the machine is profiled as `moectl profile
--hardware` does it, and then every preset and budget runs, in an order of its own, so that other
work falls on both; the simulator replays the trace with that profile.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from artifacts.hardware.profile import HardwareProfile
from artifacts.modelshapes.known import guessed
from artifacts.traces.trace import Trace
from profilers.compare.quality import read
from profilers.hardware.load_times import TimingEffort
from profilers.hardware.policy_overhead import deciding
from profilers.hardware.profile import measure as profile
from runtime.model.open import MoeModel, open_model
from runtime.replay.measured_machine import costs_of, machine_of
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload
from runtime.session.session import Session, Settings
from runtime.tiers.ram import RamStore
from tools.bench.performance import Ratio, Section, Table

PRESETS = ("on-demand", "near", "mixtral-offloading", "specmd", "moe-infinity")
BUDGETS = ("12.5%", "25%", "50%")
PROMPT = 16
NUM_SEQUENCES = 2
DECIDING = 4
EFFORT = TimingEffort(lengths=(PROMPT,), turns=20)


@dataclass(frozen=True, slots=True)
class Run:
    """One setting in one round: milliseconds of every live token, the simulated mean, and the hit
    rate of both."""

    live_ms: Sequence[float]
    simulated_ms: float
    hit_rate: float


def measure(
    models: dict[str, Path], *, link: dict[str, str], rounds: int, tokens: int, effort: TimingEffort
) -> Section:
    """A table for each model over its link."""
    return Section(
        "link",
        [
            table(name, folder, link[name], rounds=rounds, tokens=tokens, effort=effort)
            for name, folder in models.items()
        ],
    )


def table(
    name: str, folder: Path, link: str, *, rounds: int, tokens: int, effort: TimingEffort
) -> Table:
    """Measure one model. Each setting decodes the same few sequences of the same number of tokens
    from an empty cache."""
    opened = open_model(str(folder))
    opened = replace(opened, store=RamStore(opened.store))  # once, not for every session
    random = np.random.default_rng(0)
    sequences = [
        random.integers(3, opened.config.vocab_size, PROMPT + tokens) for _ in range(NUM_SEQUENCES)
    ]
    traces = {preset: _trace(opened, preset, sequences) for preset in PRESETS}
    own_work = deciding(opened, link, tokens=DECIDING)
    window = _window(opened, folder, link, effort)
    found: dict[tuple[str, str], list[Run]] = {
        (preset, budget): [] for preset in PRESETS for budget in BUDGETS
    }
    for _ in range(rounds):
        measured = profile(opened, folder, link=link, effort=effort)
        measured = replace(measured, conditions={**measured.conditions, "deciding": own_work})
        for index in random.permutation(len(found)):
            preset, budget = list(found)[index]
            settings = Settings(preset, budget=budget, link=link, window=window)
            found[preset, budget].append(
                _run(opened, settings, sequences, traces[preset], measured)
            )
    return _table(name, link, found, f"{rounds} rounds of {NUM_SEQUENCES} x {tokens} tokens")


def _window(opened: MoeModel, folder: Path, link: str, effort: TimingEffort) -> str:
    """The prefetch window of a layer, measured once so that every round makes the same
    decisions."""
    costs = costs_of(profile(opened, folder, link=link, effort=effort), opened.shape)
    return f"{costs.window_nbytes(opened.shape.expert_nbytes, opened.shape.top_k)}B"


def _trace(opened: MoeModel, preset: str, sequences: Sequence[np.ndarray]) -> Trace:
    with Session(opened, Settings(preset, link="1000GB/s")) as session:
        recorder = session.record()
        read(session, sequences, prefill=PROMPT)
        return recorder.trace()


def _run(
    opened: MoeModel,
    settings: Settings,
    sequences: Sequence[np.ndarray],
    trace: Trace,
    measured: HardwareProfile,
) -> Run:
    with Session(opened, settings) as session:
        reading = read(session, sequences, prefill=PROMPT)
        window = session.parts.window
        counters = session.controller.counters.totals()
    model = replace(guessed(opened.shape), name="measured", assumed=())  # its costs are measured
    machine = machine_of(measured, opened.shape)
    costs = costs_of(measured, opened.shape)
    workload = Workload(trace, model, machine, costs=costs, window=window)
    outcome = workload.run(Setting(settings.preset, settings.preset, budget=settings.budget))
    assert outcome.counters == counters, "a live run and its replay decide alike"
    rate = counters["hits"] / counters["requests"]
    return Run([1e3 * seconds for seconds in reading.decode_s], outcome.times["tpot_ms"], rate)


def _table(name: str, link: str, found: dict[tuple[str, str], list[Run]], told: str) -> Table:
    rows = []
    off = {}
    for (preset, budget), runs in found.items():
        live = np.array([run.live_ms for run in runs])
        simulated = np.array([[run.simulated_ms] for run in runs])
        ratio = Ratio(*np.percentile(live / simulated, [50, 25, 75], axis=0).mean(axis=1).tolist())
        ms = (f"{np.median(own, axis=0).mean():.2f}" for own in (live, simulated))
        rows.append((preset, budget, f"{runs[0].hit_rate:.2f}", *ms, *ratio.cells()))
        off[f"{name}, {preset}, {budget}"] = _off(ratio)
    columns = (
        "preset",
        "budget",
        "hit rate",
        "live, ms/token",
        "simulated",
        "live / simulated",
        "quartiles",
    )
    note = f"means over tokens, of each the median over {told}, after prompts of {PROMPT}"
    return Table(f"{name}, {link}", columns, rows, note, off)


def _off(ratio: Ratio) -> Ratio:
    """The relative difference of both."""
    return ratio if ratio.median >= 1 else Ratio(1 / ratio.median, 1 / ratio.upper, 1 / ratio.lower)
