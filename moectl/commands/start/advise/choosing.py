"""Choice of a placement, a quant and a draft length: the fastest of what an engine can do."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from artifacts.errors import BadUsage
from artifacts.hardware.machines import SSD_GBPS, Machine
from artifacts.modelshapes.known import MODELS
from artifacts.shape import Shape
from artifacts.traces.parquet import read_parquet
from moectl.bundled import bundled_trace, bundled_traces
from moectl.commands.start.advise.engines import Engine, Placement
from moectl.commands.start.advise.predicting import (
    Prediction,
    Replayed,
    drafted,
    predict,
    tried_rate,
)
from moectl.commands.start.plan.answer import (
    OWN,
    Fit,
    PlanAnswer,
    in_ram,
    plan_answer,
    quantised,
    with_disk,
)
from moectl.commands.start.plan.fitting import Memory, PlanRequest, divided
from moectl.commands.start.plan.needs import Needs

ACCEPTANCE = 0.65
"""Assumed chance that a draft is right where those before it are: of MTP layers, as users post."""
DRAFTS = (1, 2, 3)
LEAST_GAIN = 1.03
"""What a setting that is worth a flag gains at least."""
_AT_ONCE_GBPS = 1e6


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice for a request: the `quant` of the model `needs`, the fastest of the `tried` placements
    and its `prediction`; tokens a second by number of drafts a pass (`drafts`), of the best
    placement `without` a cache, and if every load were known in time (`ahead`). `narrower`: the
    widest quant that would be whole on the GPU, and its tokens a second."""

    request: PlanRequest
    engine: Engine
    needs: Needs
    quant: str
    memory: Memory
    trace: Replayed
    placement: Placement
    prediction: Prediction
    tried: Sequence[tuple[Placement, float]]
    drafts: dict[int, float]
    without: tuple[Placement, float] | None
    ahead: float
    narrower: tuple[Fit, float] | None = None

    @property
    def num_drafts(self) -> int:
        """The number of drafts a pass that is fastest, 0 where none pays."""
        return _first_of(list(self.drafts.items()))

    @property
    def can_draft(self) -> bool:
        """True if the model's files have layers that draft and the engine uses them."""
        return bool(self.needs.memory.drafting_nbytes and self.engine.drafts_by)


Option = TypeVar("Option")


def _first_of(rates: Sequence[tuple[Option, float]]) -> Option:
    """Return the first option that is as fast as the fastest, but for what is not worth a flag."""
    most = max(rate for _, rate in rates)
    return next(option for option, rate in rates if rate * LEAST_GAIN >= most)


def advise_on(
    request: PlanRequest,
    engine: Engine,
    trace: str | None = None,
    *,
    replayed: Replayed | None = None,
    quant: tuple[str, float] | None = None,
) -> Advice:
    """Return the advice, by the trace of that file or name, or one that was `replayed` before.
    `quant`: a name and bits a weight in place of the best. Raises BadUsage, BadInput or
    OutOfResources."""
    _check(request)
    answer = plan_answer(request, as_stored=engine.has_stored_weights)
    name, bits = quant or (answer.best.quant, answer.best.bits)
    needs = answer.needs if name == OWN else _in_bits(answer.needs, bits)
    memory = _divided(request, needs, engine)
    machine = _machine(request, needs, memory)
    replayed = replayed or opened_trace(trace, needs)

    def rate(placement: Placement, trace: Replayed = replayed, machine: Machine = machine) -> float:
        return tried_rate(needs, machine, placement, engine, trace)

    tried = [(each, rate(each)) for each in _placements(memory, needs, engine)]
    placement = _first_of(tried)
    traces = {0: replayed} | {number: drafted(replayed, number, ACCEPTANCE) for number in DRAFTS}
    off = [pair for pair in tried if not pair[0].cache_nbytes and not pair[0].pinned_nbytes]
    advice = Advice(
        request=request,
        engine=engine,
        needs=needs,
        quant=name,
        memory=memory,
        trace=replayed,
        placement=placement,
        prediction=predict(needs, machine, placement, engine, replayed),
        tried=tried,
        drafts={0: dict(tried)[placement]}
        | {number: rate(placement, traces[number]) for number in DRAFTS},
        without=max(off, key=lambda pair: pair[1], default=None),
        ahead=0.0,
        narrower=None
        if quant or placement.share == 1
        else _narrower(answer, machine, engine, replayed),
    )
    if advice.can_draft and advice.num_drafts:
        replayed = traces[advice.num_drafts]
        prediction = predict(needs, machine, placement, engine, replayed)
        advice = replace(advice, prediction=prediction)
    at_once = replace(machine, link_gbps=_AT_ONCE_GBPS, link_latency_s=0.0, ram_gbps=None)
    loaded_s = advice.prediction.loads_per_token * needs.model.shape.expert_nbytes
    link_s = loaded_s / machine.link_gbps / 1e9
    return replace(advice, ahead=1 / max(link_s, 1 / rate(placement, replayed, at_once)))


def _check(request: PlanRequest) -> None:
    if request.place.machine is None:
        raise BadUsage(
            "advice needs the bandwidths of a GPU, and none is known here: name one, as "
            "--machine rtx5070"
        )


def _machine(request: PlanRequest, needs: Needs, memory: Memory) -> Machine:
    """Return the place's machine; experts that its RAM does not hold come from the disk, to link
    and CPU alike."""
    machine = request.place.machine
    outside = (1 - memory.share) * needs.model.shape.nbytes
    held = in_ram(request.place, outside)
    if held == 1 or machine.is_unified:
        return machine
    near = 1 / (held / machine.near_gbps + (1 - held) / SSD_GBPS)
    return replace(with_disk(machine, held), near_gbps=near)


def _narrower(
    answer: PlanAnswer, machine: Machine, engine: Engine, trace: Replayed
) -> tuple[Fit, float] | None:
    whole = next((fit for fit in answer.fits if fit.place == "GPU"), None)
    if whole is None:
        return None
    needs = _in_bits(answer.needs, whole.bits)
    return whole, tried_rate(needs, machine, Placement(1.0), engine, trace)


def _in_bits(needs: Needs, bits: float) -> Needs:
    return Needs(*quantised(needs.model, needs.memory, bits), needs.is_gguf)


def _divided(request: PlanRequest, needs: Needs, engine: Engine) -> Memory:
    """Return what the GPU's memory holds; the engine keeps other weights as they are stored, or in
    the model's dtype."""
    memory = needs.memory.as_stored() if engine.has_stored_weights else needs.memory
    return divided(request, needs.model, memory)


def _placements(memory: Memory, needs: Needs, engine: Engine) -> list[Placement]:
    """Return what the engine can do with the memory: the whole model on the GPU; else whole layers,
    where it places them, and its cache of whole slots."""
    shape = needs.model.shape
    if memory.share == 1:
        return [Placement(1.0)]
    slots = memory.experts_nbytes // shape.expert_nbytes
    layers = slots // shape.num_experts
    whole = [Placement(layers / shape.num_layers)] if engine.has_whole_layers else []
    return [*whole, *engine.options(slots * shape.expert_nbytes)]


def opened_trace(named: str | None, needs: Needs) -> Replayed:
    """Return the trace of that file or name, else the bundled one whose model is nearest by number
    of experts and of those selected."""
    shape = needs.model.shape
    path = bundled_trace(Path(named)) if named else None
    if named and not path:
        trace = read_parquet(named)
        is_own = (trace.num_layers, trace.top_k) == (shape.num_layers, shape.top_k)
        num_experts = shape.num_experts if is_own else int(trace.experts.max()) + 1
        of = f"{Path(named).name}{'' if is_own else ' (of another model)'}"
    else:
        bundled = {name: MODELS[name].shape for name in bundled_traces()}
        name = named or min(bundled, key=lambda name: _distance(bundled[name], shape))
        trace = read_parquet(bundled_trace(Path(name)))
        other = bundled[name]
        num_experts = other.num_experts
        is_own = (other.num_keys, other.top_k) == (shape.num_keys, shape.top_k)
        of = f"the recorded trace of {name}{'' if is_own else ', the nearest at hand'}"
    num_tokens = len(trace) // trace.num_layers
    return Replayed.of(trace, num_experts, f"replay of {of}, {num_tokens:,} tokens", is_own=is_own)


def _distance(one: Shape, other: Shape) -> float:
    def ratio(first: int, second: int) -> float:
        return max(first, second) / min(first, second)

    return ratio(one.num_experts, other.num_experts) * ratio(one.top_k, other.top_k)
