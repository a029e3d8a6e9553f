"""Fits the dials of a synthetic trace to what is known of a real one: its statistics, or its hit
rates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from artifacts.errors import BadUsage
from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import ModelShape
from artifacts.shape import Shape
from artifacts.traces.synthetic import MOST_SKEW, Dials, generate
from runtime.control.counters import hit_rate
from runtime.policies.presets import Scope
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload
from tools.lab.trace_statistics import Statistics, measure, recall

# By dial: the statistic that it moves, and its largest value.
_MOVES: Mapping[str, tuple[str, float]] = {
    "skew": ("concentration", MOST_SKEW),
    "locality": ("reuse", 1.0),
    "similarity": ("similarity", 1.0),
}
_ROUNDS = 3
_HALVINGS = 7
_COARSE = {"skew": (0.0, 0.4, 0.8, 1.4, 2.2), "locality": (0.0, 0.2, 0.5, 0.8)}
_STEPS = {"skew": 0.2, "locality": 0.1}  # around the best of these, halved down to an eighth
_MOST = {"skew": MOST_SKEW, "locality": 1.0}
_FITTED_LAYERS = 2


@dataclass(frozen=True, slots=True)
class HitRates:
    """Hit rates of an eviction policy with demand loads only, by experts that each layer holds."""

    eviction: str
    rates: Mapping[int, float]


def parse_hit_rates(text: str) -> HitRates:
    """Parse `lru:10=.23,20=.4`. Raises BadUsage."""
    eviction, _, rates = text.partition(":")
    try:
        pairs = [piece.split("=") for piece in rates.split(",")]
        by_held = {int(held): float(rate) for held, rate in pairs}
    except ValueError:
        message = (
            f"hit rates {text!r} are not understood: write POLICY:HELD=RATE,..., as "
            "lru:10=.23,20=.4"
        )
        raise BadUsage(message) from None
    if not all(held > 0 and 0 <= rate <= 1 for held, rate in by_held.items()):
        raise BadUsage(f"hit rates {text!r}: experts held are positive, rates between 0 and 1")
    return HitRates(eviction, by_held)


def fit_statistics(target: Statistics, shape: Shape, start: Dials) -> Dials:
    """Return dials whose trace has the statistics of `target`, by bisecting each dial in turn.
    Dials whose statistic `target` lacks stay as in `start`."""
    dials = (
        start
        if target.prediction is None
        else replace(start, predictability=round(target.prediction, 4))
    )
    for _ in range(_ROUNDS):
        for name, (statistic, most) in _MOVES.items():
            wanted = getattr(target, statistic)
            if wanted is not None:
                dials = replace(
                    dials, **{name: _halved(_response(dials, name, statistic, shape), wanted, most)}
                )
    return (
        dials
        if target.prediction is None
        else replace(dials, grading=_grading(target, shape, dials))
    )


def _grading(target: Statistics, shape: Shape, dials: Dials) -> float:
    """Return the share of predictions that must be graded for the near predictions of `target`, to
    which it is proportional."""
    width = min(2 * shape.top_k, shape.num_experts)
    most = recall(generate(replace(dials, grading=1.0), shape), width) - target.prediction
    gained = target.near_prediction - target.prediction
    return round(min(gained / most, 1.0), 4) if most > 0 < gained else 0.0


def _response(dials: Dials, name: str, statistic: str, shape: Shape) -> Callable[[float], float]:
    def reached(value: float) -> float:
        trace = generate(replace(dials, **{name: value}), shape, detailed=False)
        return getattr(measure(trace, shape.num_experts), statistic)

    return reached


def _halved(rising: Callable[[float], float], wanted: float, most: float) -> float:
    """Return where a rising function takes the wanted value, to `most / 2**_HALVINGS`, in four
    decimals."""
    low = 0.0
    high = most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return round((low + high) / 2, 4)


def hit_rates(
    dials: Dials, model: ModelShape, wanted: Sequence[HitRates], *, num_layers: int
) -> list[HitRates]:
    """Return the hit rates that the policies of `wanted` reach on a synthetic trace, with as many
    experts held."""
    shape = replace(model.shape, num_layers=num_layers)
    workload = Workload(
        generate(dials, shape, detailed=False), replace(model, shape=shape), machine("a100-pcie4")
    )
    reached = []
    for row in wanted:
        rates = {}
        for held in row.rates:
            budget = f"{held * num_layers}x"
            setting = Setting(
                "", policies={"eviction": row.eviction}, scope=Scope.LAYER, budget=budget
            )
            rates[held] = hit_rate(workload.run(setting).counters)
        reached.append(HitRates(row.eviction, rates))
    return reached


def misfit(reached: Sequence[HitRates], wanted: Sequence[HitRates]) -> float:
    """Return the root mean squared difference over all rows and sizes."""
    differences = [
        mine.rates[held] - rate
        for mine, theirs in zip(reached, wanted, strict=True)
        for held, rate in theirs.rates.items()
    ]
    return float(np.sqrt(np.mean(np.square(differences))))


def fit_hit_rates(
    wanted: Sequence[HitRates],
    model: ModelShape,
    start: Dials,
    *,
    progress: Callable[[int], None] = lambda tried: None,
) -> Dials:
    """Return `start` with the skew and locality whose hit rates come nearest: from the best of a
    coarse grid, move to the best neighbour until there is none, then with half the step.

    The synthetic trace has two layers, since all its layers are alike.
    """
    tried: dict[Dials, float] = {}

    def cost(dials: Dials) -> float:
        if dials not in tried:
            reached = hit_rates(dials, model, wanted, num_layers=_FITTED_LAYERS)
            tried[dials] = misfit(reached, wanted)
            progress(len(tried))
        return tried[dials]

    grid = product(*(((name, value) for value in values) for name, values in _COARSE.items()))
    best = min((replace(start, **dict(turned)) for turned in grid), key=cost)
    share = 1.0
    while share >= 1 / 8:
        nearest = min([best, *_neighbours(best, share)], key=cost)
        if nearest == best:
            share /= 2
        best = nearest
    return best


def _neighbours(dials: Dials, share: float) -> list[Dials]:
    """Return the dials with one or both turned a step up or down."""
    steps = [(-share, 0.0, share)] * len(_STEPS)
    return [
        replace(
            dials,
            **{name: _turned(dials, name, turn) for name, turn in zip(_STEPS, turns, strict=True)},
        )
        for turns in product(*steps)
        if any(turns)
    ]


def _turned(dials: Dials, name: str, turn: float) -> float:
    return round(min(max(getattr(dials, name) + turn * _STEPS[name], 0.0), _MOST[name]), 6)
