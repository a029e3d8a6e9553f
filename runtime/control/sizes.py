"""Parses budgets, rates and times as users write them: `25%`, `96x`, `2GiB`, `5GB/s+10us`,
`14ms`."""

import math
import re

from artifacts.errors import BadUsage
from artifacts.shape import Shape

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_NUMBER = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z%/]*)\s*$", re.IGNORECASE)
_BUDGET = "budget {!r} is not understood: write a share (25%), experts (96x) or bytes (2GiB)"
_MOST_NBYTES = 1 << 60
_MOST_LATENCY_S = 60.0
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def num_slots(budget: str, shape: Shape, *, per_layer: bool, num_devices: int = 1) -> int:
    """Return how many experts fit a budget: a share of all experts (`25%`), experts (`96x`) or
    bytes (`2GiB`, `500MB`), over all layers.

    A budget above the model's size holds the model. Raises BadUsage for text that is no budget, and
    for a budget below one expert on each device (one a layer there when `per_layer`).
    """
    value, unit = _parse(budget, _BUDGET.format(budget))
    if unit == "%":
        wanted = value / 100 * shape.num_keys
    elif unit == "x":
        wanted = value
    else:
        wanted = value * _unit(unit, budget) / shape.expert_nbytes
    fitting = math.floor(min(wanted, shape.num_keys) + 1e-9)
    least = (shape.num_layers if per_layer else 1) * num_devices
    if fitting < least:
        needed = (
            "one expert"
            + " a layer" * per_layer
            + f" on each of {num_devices} devices" * (num_devices > 1)
        )
        raise BadUsage(
            f"budget {budget!r} holds {fitting} experts and {needed} is the least: give at least "
            f"{least}x ({least * shape.expert_nbytes:,} bytes)"
        )
    return fitting


def budget_nbytes(budget: str, shape: Shape) -> int:
    """Return the bytes of the same budget, at most those of all experts. Raises BadUsage for text
    that is no budget."""
    value, unit = _parse(budget, _BUDGET.format(budget))
    scale = {"%": shape.nbytes / 100, "x": shape.expert_nbytes}.get(unit) or _unit(unit, budget)
    return math.floor(min(value * scale + 1e-6, shape.nbytes))


def budget_text(budget: str | float) -> str:
    """Return a budget as commands take it: a number is a share, .25 for `25%`."""
    return budget if isinstance(budget, str) else f"{100 * budget:g}%"


def check_budget(budget: str) -> None:
    """Raise BadUsage for text that is no budget of any model; a bare number up to 100 is taken for
    a forgotten sign."""
    value, unit = _parse(budget, _BUDGET.format(budget))
    if not unit and 0 < value <= 100:
        raise BadUsage(f"{_BUDGET.format(budget)}; did you mean {budget.strip()}%?")
    budget_nbytes(budget, Shape(1, 1, 1, 1))


def nbytes(text: str) -> int:
    """Return a size in bytes: `2GiB`, `500MB`, `4096`. Raises BadUsage."""
    message = f"size {text!r} is not understood: write bytes, as 64KiB or 2GB"
    value, unit = _parse(text, message)
    size = value * _unit(unit, text)
    if size >= _MOST_NBYTES:
        raise BadUsage(message)
    return math.floor(size)


def rate(text: str) -> tuple[float, float]:
    """Return bytes per second and latency in seconds of `5GB/s` or `5GB/s+10us`. Raises
    BadUsage."""
    speed, _, delay = text.partition("+")
    message = f"rate {text!r} is not understood: write bytes per second, as 5GB/s or 5GB/s+10us"
    value, unit = _parse(speed, message)
    latency, latency_unit = _parse(delay or "0s", message)
    if not unit.endswith("/s") or latency_unit not in _SECONDS:
        raise BadUsage(message)
    bandwidth = value * _unit(unit[:-2], text)
    latency_s = latency * _SECONDS[latency_unit]
    if not 1 <= bandwidth < _MOST_NBYTES or latency_s > _MOST_LATENCY_S:
        raise BadUsage(message)
    return bandwidth, latency_s


def seconds(text: str) -> float:
    """Return a time above 0 in seconds: `14ms`, `80us`, `0.5s`. Raises BadUsage."""
    message = f"time {text!r} is not understood: write a number and us, ms or s, as 14ms"
    value, unit = _parse(text, message)
    if unit not in _SECONDS or not 0 < value * _SECONDS[unit] <= _MOST_LATENCY_S:
        raise BadUsage(message)
    return value * _SECONDS[unit]


def _parse(text: str, message: str) -> tuple[float, str]:
    match = _NUMBER.match(text)
    if not match or not math.isfinite(float(match[1])):
        raise BadUsage(message)
    return float(match[1]), match[2]


def _unit(unit: str, text: str) -> int:
    if unit not in _UNITS:
        raise BadUsage(
            f"unit {unit!r} in {text!r} is not known: use one of "
            f"{', '.join(u for u in _UNITS if u)}"
        )
    return _UNITS[unit]
