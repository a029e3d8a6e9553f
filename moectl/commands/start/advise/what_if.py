"""Counterfactuals: what each change of the machine, the quant or the run would give on the same
trace."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from artifacts.errors import BadUsage, OutOfResources
from artifacts.hardware.machines import machine
from moectl.commands.start.advise.answer import rounded
from moectl.commands.start.advise.choosing import Advice, advise_on
from moectl.commands.start.advise.engines import AdvisedEngine
from moectl.commands.start.advise.predicting import ReplayedTrace, SpeedPrediction
from moectl.commands.start.plan.answer import USUAL_QUANTS
from moectl.commands.start.plan.fitting import PlanRequest
from moectl.commands.start.plan.place import PlanPlace
from moectl.show.sizes import human_bytes
from runtime.control import sizes

QUANTS = USUAL_QUANTS | {
    "Q5_K_M": 5.7,
    "IQ4_XS": 4.3,
    "Q3_K_M": 3.9,
    "IQ3_S": 3.5,
    "Q2_K": 3.0,
    "Q2_0": 2.25,
}
_LINKS_GBPS = {"pcie3": 12.5, "pcie4": 25.0, "pcie5": 50.0}
_RAM_GBPS = {"ddr4": 40 / 3200, "ddr5": 70 / 5600}
"""Practical GB/s of two channels, by MT/s."""
_MOST = 10
_KNOWN = "+8GiB vram, +64GiB ram, ddr5-6000, pcie5, quant Q4_K_M, mtp, a machine as rtx5090"


@dataclass(frozen=True, slots=True)
class Change:
    """A change by its name: of the request, or of the quant, or `drafts`."""

    name: str
    request: Callable[[PlanRequest], PlanRequest] = lambda request: request
    quant: tuple[str, float] | None = None
    drafts: bool = False

    def advice(self, request: PlanRequest, engine: AdvisedEngine, trace: ReplayedTrace) -> Advice:
        """Return the advice after the change. Raises as `advise_on` does."""
        return advise_on(self.request(request), engine, replayed=trace, quant=self.quant)


def changes_of(text: str) -> list[Change]:
    """Return the changes that a comma-separated text names, ten at most. Raises BadUsage."""
    changes = [_change(part.strip()) for part in text.split(",") if part.strip()]
    if not 0 < len(changes) <= _MOST:
        raise BadUsage(f"--what-if takes 1 to {_MOST} changes, not {len(changes)}: {_KNOWN}")
    return changes


def _change(name: str) -> Change:
    if more := re.fullmatch(r"\+(\S+)\s+(vram|ram)", name, re.IGNORECASE):
        return Change(name, _grown(more[2].lower(), sizes.nbytes(more[1])))
    if link_gbps := _LINKS_GBPS.get(name.lower()):
        return Change(name, _with_rates(link_gbps=link_gbps))
    if ram := re.fullmatch(r"(ddr[45])-(\d{4,5})", name, re.IGNORECASE):
        ram_gbps = _RAM_GBPS[ram[1].lower()] * int(ram[2])
        return Change(name, _with_rates(near_gbps=ram_gbps, ram_gbps=ram_gbps))
    if quant := re.fullmatch(r"quant\s+(\S+)", name, re.IGNORECASE):
        return Change(name, quant=_quant(name, quant[1].upper()))
    if name.lower() == "mtp":
        return Change(name, drafts=True)
    return Change(name, _other_machine(name))


def _quant(name: str, quant: str) -> tuple[str, float]:
    if quant not in QUANTS:
        raise BadUsage(f"--what-if {name}: the quants are {', '.join(QUANTS)}")
    return quant, QUANTS[quant]


def _other_machine(name: str) -> Callable[[PlanRequest], PlanRequest]:
    try:
        other = machine(name)
    except BadUsage as error:
        raise BadUsage(f"--what-if {name}: say {_KNOWN}") from error
    return _of_place(lambda _: PlanPlace.find(None, other.name))


def _of_place(change: Callable[[PlanPlace], PlanPlace]) -> Callable[[PlanRequest], PlanRequest]:
    return lambda request: replace(request, place=change(request.place))


def _with_rates(**rates: float) -> Callable[[PlanRequest], PlanRequest]:
    return _of_place(lambda place: replace(place, machine=replace(place.machine, **rates)))


def _grown(memory: str, more_nbytes: int) -> Callable[[PlanRequest], PlanRequest]:
    field = f"{memory}_nbytes"

    def grown(place: PlanPlace) -> PlanPlace:
        larger = replace(place, **{field: getattr(place, field) + more_nbytes})
        return replace(larger, vram=human_bytes(larger.vram_nbytes))

    return _of_place(grown)


def told(
    changes: list[Change], request: PlanRequest, engine: AdvisedEngine, trace: str | None
) -> Iterator[str]:
    """Yield a line for the advice as it is, for each change alone, and for the one that buys
    most."""
    now = advise_on(request, engine, trace)
    before = now.prediction.tokens_per_second
    yield f"{now.needs.model.name} on {request.place.shown}, for {engine.name} {engine.version}"
    yield f"{'as it is':20}{_shown(now.prediction, before)}".rstrip()
    rates = {}
    for change in changes:
        try:
            other = change.advice(request, engine, now.trace)
        except OutOfResources as error:
            yield f"{change.name:20}{'-':>8}          {error}"
            continue
        rates[change.name] = _rate(other, change)
        yield _line(change, other, before)
    yield _best(rates, before)
    yield from now.prediction.grounds


def _line(change: Change, advice: Advice, before: float) -> str:
    rate = _rate(advice, change)
    shown = _shown(advice.prediction, rate)
    return f"{change.name:20}{shown}{rate / before - 1:>+7.0%}{_loses(change)}"


def _best(rates: dict[str, float], before: float) -> str:
    best = max(rates, key=rates.__getitem__, default=None)
    if best and rates[best] > before:
        return f"buys most: {best}"
    return "none of these buys anything"


def _shown(prediction: SpeedPrediction, rate: float) -> str:
    """Return a rate with the prediction's interval about it."""
    share = rate / prediction.tokens_per_second
    between = f"({rounded(share * prediction.low)} to {rounded(share * prediction.high)})"
    return f"{rounded(rate):>8} tokens/s {between:16}"


def _rate(advice: Advice, change: Change) -> float:
    return max(advice.drafts.values()) if change.drafts else advice.prediction.tokens_per_second


def _loses(change: Change) -> str:
    return "  loses: not measured" if change.quant else ""
