"""Advice in at most fifteen lines, each number with what it rests on."""

from collections.abc import Iterator

from artifacts.common.untrusted import existing
from artifacts.modelshapes.repositories import REPOSITORIES
from moectl.commands.start.advise.choosing import ACCEPTANCE, Advice
from moectl.commands.start.advise.engines import MIB, ExpertPlacement, Run
from moectl.commands.start.advise.predicting import SpeedPrediction
from moectl.commands.start.plan.answer import OWN
from moectl.commands.start.plan.needs import known_name
from moectl.show.grounds import TOY_NBYTES
from moectl.show.sizes import human_bytes
from runtime.replay.pool import SOONEST

_WORTH_LOOKING = 0.1  # a look-ahead is never right in time everywhere, and costs time itself


def lines(advice: Advice) -> Iterator[str]:
    """Yield the advice."""
    engine = advice.engine
    yield f"{advice.needs.model.name} on {_place(advice)}, for {engine.name} {engine.version}"
    yield f"speed: {_speed(advice.prediction)}"
    yield f"placement: {_placement(advice)}"
    yield f"cache: {_cache(advice)}"
    if shares := _shares(advice):
        yield f"CPU: {shares}"
    yield f"drafts: {_drafts(advice)}"
    yield f"prediction: {_ahead(advice)}"
    yield f"quant: {_quant(advice)}"
    yield f"flags: {engine.flags(run_of(advice))}"
    yield from advice.prediction.grounds
    if advice.needs.model.shape.nbytes < TOY_NBYTES:
        yield "so small a model has no times on a data sheet: only ratios mean anything"
    yield (
        f"drafts: an acceptance of {ACCEPTANCE} and one layer a draft are assumed; rejected ones "
        "route as the next tokens do"
    )
    yield f"flags and rules: a reading of {engine.source}; nothing of it was run here"


def _place(advice: Advice) -> str:
    place = advice.request.place
    ram = f", {human_bytes(place.ram_nbytes)} of RAM" if place.ram_nbytes else ""
    return f"{place.shown}{ram}"


def _speed(prediction: SpeedPrediction) -> str:
    return (
        f"{rounded(prediction.tokens_per_second)} tokens/s, between {rounded(prediction.low)} and "
        f"{rounded(prediction.high)}: {prediction.of_limit:.0%} of the byte limit "
        f"{rounded(prediction.limit)}"
    )


def run_of(advice: Advice) -> Run:
    """Return what flags are written for."""
    shape = advice.needs.model.shape
    model, gguf = _names(advice)
    return Run(
        model,
        gguf,
        advice.placement,
        shape.num_layers,
        shape.num_experts,
        shape.nbytes,
        advice.request.context,
        advice.num_drafts if advice.can_draft else 0,
    )


def _names(advice: Advice) -> tuple[str, str]:
    """Return the model's path or repository, and that of its GGUF files; the latter is empty for a
    path."""
    named = advice.request.model
    if path := existing(named):
        return (f"{path.name}.gguf" if path.is_dir() else named), ""
    known = REPOSITORIES.get(known_name(named) or "")
    quant = "" if advice.quant == OWN else f":{advice.quant}"
    if known is None:
        return named, f"{named}{quant if ':' not in named else ''}"
    return known.hub, f"{known.gguf or 'OWNER/NAME-GGUF'}{quant}"


def _placement(advice: Advice) -> str:
    memory = advice.memory
    beside = (
        f"on the GPU {human_bytes(memory.weights_nbytes)} of weights besides experts, "
        f"{human_bytes(memory.cache_nbytes)} of attention cache"
    )
    placed = advice.placement
    if placed.share == 1:
        return f"{beside} and all experts"
    whole = round(placed.share * advice.needs.model.shape.num_layers)
    held = f"the experts of {whole} layers" if whole else f"{run_of(advice).on_gpu:.1%} of experts"
    return f"{beside}, {held}; experts in RAM"


def _cache(advice: Advice) -> str:
    placed = advice.placement
    without = advice.without
    if placed.share == 1:
        return "off: all experts fit without one"
    if placed.pinned_nbytes:
        return (
            f"{human_bytes(placed.pinned_nbytes)} of the most used experts hit "
            f"{advice.prediction.hit_rate:.1%}"
        )
    if placed.cache_nbytes:
        off = ""
        if without:
            off = f"; off, {_whole(advice, without[0])}: {rounded(without[1])} tokens/s"
        return (
            f"on, {placed.cache_nbytes // MIB} MiB hit {advice.prediction.hit_rate:.1%} of the "
            f"time{off}"
        )
    on = max((pair for pair in advice.tried if pair[0].cache_nbytes), key=lambda pair: pair[1])
    return (
        f"turn it off: on, with {on[0].cache_nbytes // MIB} MiB, it gives {rounded(on[1])} "
        f"tokens/s; off, {_whole(advice, placed)}, {rounded(advice.prediction.tokens_per_second)}"
    )


def _whole(advice: Advice, placement: ExpertPlacement) -> str:
    num_layers = advice.needs.model.shape.num_layers
    return f"{round(placement.share * num_layers)} of {num_layers} layers on the GPU"


def _shares(advice: Advice) -> str:
    """Tell what each share of the misses on the CPU gives."""
    cached = [pair for pair in advice.tried if pair[0].cache_nbytes]
    if len(cached) < 2:
        return ""
    told = ", ".join(f"{_share(each)} {rounded(rate)}" for each, rate in cached)
    chosen = advice.placement if advice.placement.cache_nbytes else cached[0][0]
    return f"{_share(chosen)} of the misses; tokens/s by share: {told}"


def _share(placement: ExpertPlacement) -> str:
    share = placement.near_share
    return "as rates say" if share == SOONEST else f"{share:.0%}"


def _drafts(advice: Advice) -> str:
    told = ", ".join(f"{number} {rounded(rate)}" for number, rate in advice.drafts.items())
    number = advice.num_drafts
    if not number:
        return f"turn them off, none pays; tokens/s by drafts a pass: {told}"
    lacks = ""
    if not advice.engine.drafts_by:
        lacks = f", if {advice.engine.name} drafts for this model"
    elif not advice.can_draft:
        lacks = ", if you have a draft model: the files have no MTP layers"
    return f"{number} a pass{lacks}; tokens/s by drafts a pass: {told}"


def _ahead(advice: Advice) -> str:
    gain = advice.ahead / advice.prediction.tokens_per_second - 1
    what = f"loads known in time would give {rounded(advice.ahead)} tokens/s at most ({gain:+.0%})"
    if not advice.prediction.loaded_nbytes:
        return "nothing is loaded, so that none can pay"
    return f"{'may pay' if gain > _WORTH_LOOKING else 'hardly pays'}: {what}"


def _quant(advice: Advice) -> str:
    bits = 8 * advice.needs.model.weight_nbytes
    exact = "loses nothing" if advice.quant == OWN else "what it loses is not measured"
    wider = ""
    if advice.narrower:
        fit, rate = advice.narrower
        wider = f"; {fit.quant} would fit whole: {rounded(rate)} tokens/s, loss not measured"
    return f"{advice.quant}, {bits:.1f} bits a weight, {exact}{wider}"


def rounded(value: float) -> str:
    return f"{float(f'{value:.3g}'):g}"
