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
from artifacts.traces.trace import Trace
from moectl.bundled import bundled_trace, bundled_traces
from moectl.commands.start.advise.engines import AdvisedEngine, ExpertPlacement
from moectl.commands.start.advise.predicting import (
    ReplayedTrace,
    SpeedPrediction,
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
"""The least gain of a setting that is worth a flag."""
_AT_ONCE_GBPS = 1e6


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice for a request.

    `quant` is that of the model `needs`. `machine` is the place's, which reads from disk the
    experts that its RAM does not hold. `placement` is the fastest of those `tried`, and
    `prediction` its speed. In tokens a second: `drafts` by number of drafts a pass, `without` of
    the best placement that has no cache, `ahead` if every load were known in time. `num_drafts` is
    the fastest number of drafts, 0 where none pays; `can_draft` is true if the model's files have
    layers that draft and the engine uses them. `narrower` is the widest quant that would be whole
    on the GPU, with its tokens a second.
    """

    request: PlanRequest
    engine: AdvisedEngine
    needs: Needs
    quant: str
    memory: Memory
    machine: Machine
    trace: ReplayedTrace
    placement: ExpertPlacement
    prediction: SpeedPrediction
    tried: Sequence[tuple[ExpertPlacement, float]]
    drafts: dict[int, float]
    num_drafts: int
    can_draft: bool
    without: tuple[ExpertPlacement, float] | None
    ahead: float
    narrower: tuple[Fit, float] | None = None


Option = TypeVar("Option")


def _first_of(rates: Sequence[tuple[Option, float]]) -> Option:
    """Return the first option that is as fast as the fastest, but for what is not worth a flag."""
    most = max(rate for _, rate in rates)
    return next(option for option, rate in rates if rate * LEAST_GAIN >= most)


def advise_on(
    request: PlanRequest,
    engine: AdvisedEngine,
    trace: str | None = None,
    *,
    replayed: ReplayedTrace | None = None,
    quant: tuple[str, float] | None = None,
) -> Advice:
    """Return the advice, by the trace of that file or name, or one that was `replayed` before.
    `quant`: a name and bits a weight in place of the best. Raises BadUsage, BadInput or
    OutOfResources."""
    _check(request)
    answer = plan_answer(request, as_stored=engine.has_stored_weights)
    name, bits = quant or (answer.best.quant, answer.best.bits)
    needs = answer.needs if name == OWN else _in_bits(answer.needs, bits)
    advice = _chosen(request, engine, needs, name, replayed or opened_trace(trace, needs))
    if quant or advice.placement.share == 1:
        return advice
    return replace(advice, narrower=_narrower(answer, advice.machine, engine, advice.trace))


def _chosen(
    request: PlanRequest, engine: AdvisedEngine, needs: Needs, quant: str, trace: ReplayedTrace
) -> Advice:
    """Return the advice for a model of this quant."""
    memory = _divided(request, needs, engine)
    machine = _machine(request, needs, memory)

    def rate(placement: ExpertPlacement, trace: ReplayedTrace) -> float:
        return tried_rate(needs, machine, placement, engine, trace)

    tried = [(each, rate(each, trace)) for each in _placements(memory, needs, engine)]
    placement = _first_of(tried)
    drafts = {0: dict(tried)[placement]}
    drafts |= {number: rate(placement, _with_drafts(trace, number)) for number in DRAFTS}
    num_drafts = _first_of(list(drafts.items()))
    can_draft = bool(needs.memory.drafting_nbytes and engine.drafts_by)
    used = _with_drafts(trace, num_drafts if can_draft else 0)
    prediction = predict(needs, machine, placement, engine, used)
    return Advice(
        request,
        engine,
        needs,
        quant,
        memory,
        machine,
        trace,
        placement,
        prediction,
        tried=tried,
        drafts=drafts,
        num_drafts=num_drafts,
        can_draft=can_draft,
        without=_without_cache(tried),
        ahead=_ahead(needs, machine, placement, engine, used, prediction.loaded_nbytes),
    )


def _with_drafts(trace: ReplayedTrace, number: int) -> ReplayedTrace:
    return drafted(trace, number, ACCEPTANCE) if number else trace


def _without_cache(
    tried: Sequence[tuple[ExpertPlacement, float]],
) -> tuple[ExpertPlacement, float] | None:
    off = [pair for pair in tried if not pair[0].cache_nbytes and not pair[0].pinned_nbytes]
    return max(off, key=lambda pair: pair[1], default=None)


def _ahead(
    needs: Needs,
    machine: Machine,
    placement: ExpertPlacement,
    engine: AdvisedEngine,
    trace: ReplayedTrace,
    loaded_nbytes: float,
) -> float:
    """Return the tokens a second if every load were known in time, so that only the link's bytes
    bound them."""
    at_once = replace(machine, link_gbps=_AT_ONCE_GBPS, link_latency_s=0.0, ram_gbps=None)
    rate = tried_rate(needs, at_once, placement, engine, trace)
    link_s = loaded_nbytes / machine.link_gbps / 1e9
    return 1 / max(link_s, 1 / rate)


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
    answer: PlanAnswer, machine: Machine, engine: AdvisedEngine, trace: ReplayedTrace
) -> tuple[Fit, float] | None:
    whole = next((fit for fit in answer.fits if fit.place == "GPU"), None)
    if whole is None:
        return None
    needs = _in_bits(answer.needs, whole.bits)
    return whole, tried_rate(needs, machine, ExpertPlacement(1.0), engine, trace)


def _in_bits(needs: Needs, bits: float) -> Needs:
    return Needs(*quantised(needs.model, needs.memory, bits), needs.is_gguf)


def _divided(request: PlanRequest, needs: Needs, engine: AdvisedEngine) -> Memory:
    """Return what the GPU's memory holds; the engine keeps other weights as they are stored, or in
    the model's dtype."""
    memory = needs.memory.as_stored() if engine.has_stored_weights else needs.memory
    return divided(request, needs.model, memory)


def _placements(memory: Memory, needs: Needs, engine: AdvisedEngine) -> list[ExpertPlacement]:
    """Return what the engine can do with the memory: the whole model on the GPU; else whole layers,
    where it places them, and its cache of whole slots."""
    shape = needs.model.shape
    if memory.share == 1:
        return [ExpertPlacement(1.0)]
    slots = memory.experts_nbytes // shape.expert_nbytes
    layers = slots // shape.num_experts
    whole = [ExpertPlacement(layers / shape.num_layers)] if engine.has_whole_layers else []
    return [*whole, *engine.options(slots * shape.expert_nbytes)]


def opened_trace(named: str | None, needs: Needs) -> ReplayedTrace:
    """Return the trace of that file or name, else the bundled one whose model is nearest by number
    of experts and of those selected."""
    if named and not bundled_trace(Path(named)):
        return _of_file(named, needs.model.shape)
    return _of_bundled(named, needs.model.shape)


def _of_file(named: str, shape: Shape) -> ReplayedTrace:
    trace = read_parquet(named)
    is_own = (trace.num_layers, trace.top_k) == (shape.num_layers, shape.top_k)
    num_experts = shape.num_experts if is_own else int(trace.experts.max()) + 1
    of = f"{Path(named).name}{'' if is_own else ' (of another model)'}"
    return ReplayedTrace.of(trace, num_experts, _says(of, trace), is_own=is_own)


def _of_bundled(named: str | None, shape: Shape) -> ReplayedTrace:
    bundled = {name: MODELS[name].shape for name in bundled_traces()}
    name = named or min(bundled, key=lambda name: _distance(bundled[name], shape))
    other = bundled[name]
    is_own = (other.num_keys, other.top_k) == (shape.num_keys, shape.top_k)
    of = f"the recorded trace of {name}{'' if is_own else ', the nearest at hand'}"
    trace = read_parquet(bundled_trace(Path(name)))
    return ReplayedTrace.of(trace, other.num_experts, _says(of, trace), is_own=is_own)


def _says(of: str, trace: Trace) -> str:
    return f"replay of {of}, {len(trace) // trace.num_layers:,} tokens"


def _distance(one: Shape, other: Shape) -> float:
    def ratio(first: int, second: int) -> float:
        return max(first, second) / min(first, second)

    return ratio(one.num_experts, other.num_experts) * ratio(one.top_k, other.top_k)
