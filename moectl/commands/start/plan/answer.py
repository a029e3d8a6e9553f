"""The first answer of a plan: in which of the usual quants a model fits, how fast it may be there,
what that loses and which command comes next."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from artifacts.errors import OutOfResources
from artifacts.hardware.machines import SSD_GBPS, Machine
from artifacts.modelshapes.known import ModelShape
from artifacts.modelshapes.kv_cache import AUTO
from artifacts.modelshapes.memory import BackboneMemory
from artifacts.modelshapes.repositories import REPOSITORIES
from moectl.bundled import is_bundled
from moectl.commands.start.plan.fitting import Bounds, PlanRequest, divided
from moectl.commands.start.plan.needs import Needs, known_name, needs_of
from moectl.commands.start.plan.place import SYSTEM_NBYTES, PlanPlace
from moectl.show.grounds import TOY_NBYTES
from moectl.show.sizes import human_bytes

OWN = "as published"
USUAL_QUANTS = {"Q8_0": 8.5, "Q6_K": 6.6, "Q4_K_M": 4.9, "IQ3_XXS": 3.1, "IQ2_XS": 2.4}
"""Bits of a weight, on average over the tensors of a file that llama.cpp quantises so."""

_FEW_BITS = 4.0  # below them what is lost tends to be seen
_PLACES = {"GPU": "whole in memory", "RAM": "experts in RAM", "disk": "experts from the disk"}


@dataclass(frozen=True, slots=True)
class Fit:
    """A quant of the model, `bits` a weight of its experts: its files, the share of its experts
    that the GPU's memory holds, where the others lie (GPU: nowhere else), and tokens a second from
    experts wanted equally often to all of them there. `place` is empty if it does not fit, for the
    reason `why`."""

    quant: str
    bits: float
    files_nbytes: int
    share: float = 0.0
    place: str = ""
    least: float | None = None
    most: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """What `moectl plan` says first."""

    request: PlanRequest
    needs: Needs
    fits: Sequence[Fit]

    @property
    def best(self) -> Fit:
        """The fit to take: not from the disk, then at least four bits, then whole in memory, then
        wide; beside memory, where bytes take the time, the narrowest with four bits."""
        return min((fit for fit in self.fits if fit.place), key=_order)


def _order(fit: Fit) -> tuple[bool, bool, bool, float]:
    has_few = fit.bits < _FEW_BITS
    is_whole = fit.place == "GPU"
    wide = -fit.bits if has_few or is_whole else fit.bits
    return fit.place == "disk", has_few, not is_whole, wide


def plan_answer(request: PlanRequest, *, as_stored: bool = False) -> PlanAnswer:
    """Try the checkpoint's own format and the usual quants narrower than that, with other weights
    in memory `as_stored` or dequantised. Raises BadUsage or BadInput for an unknown model,
    OutOfResources if nothing fits."""
    needs = needs_of(request.model, request.dense)
    model = needs.model
    own = 8 * model.weight_nbytes

    def fit(model: ModelShape, memory: BackboneMemory, quant: str, bits: float) -> Fit:
        return _fit(request, model, memory.as_stored() if as_stored else memory, quant, bits)

    fits = [fit(model, needs.memory, OWN, own)]
    if not needs.is_gguf and model.shape.nbytes >= TOY_NBYTES:
        for quant, bits in USUAL_QUANTS.items():
            if bits < own:
                fits.append(fit(*quantised(model, needs.memory, bits), quant, bits))
    if not any(fit.place for fit in fits):
        raise OutOfResources(min(fits, key=lambda fit: fit.bits).why)
    return PlanAnswer(request, needs, fits)


def quantised(
    model: ModelShape, needs: BackboneMemory, bits: float
) -> tuple[ModelShape, BackboneMemory]:
    """Return the model with all tensors of its files at so many bits."""
    share = bits / 8 / model.weight_nbytes
    expert = round(model.shape.expert_nbytes * share)
    weight = bits / 8 / model.dtype_nbytes
    tables = round(needs.tables_nbytes * weight)
    drafting = round(needs.drafting_nbytes * share)
    beside = needs.stored_nbytes - needs.tables_nbytes - needs.drafting_nbytes
    return (
        replace(
            model,
            shape=replace(model.shape, expert_nbytes=expert, num_neurons=0, neuron_nbytes=1),
            weight_nbytes=bits / 8,
        ),
        replace(
            needs,
            stored_nbytes=round(beside * weight) + tables + drafting,
            tables_nbytes=tables,
            drafting_nbytes=drafting,
        ),
    )


def _fit(
    request: PlanRequest, model: ModelShape, needs: BackboneMemory, quant: str, bits: float
) -> Fit:
    files = needs.stored_nbytes + model.shape.nbytes
    fit = Fit(quant, bits, files)
    try:
        _check_disk(fit, model, request.place)
        share = divided(request, model, needs).share
    except OutOfResources as error:
        return replace(fit, why=str(error))
    held = in_ram(request.place, (1 - share) * model.shape.nbytes)
    where = "GPU" if share == 1 else "RAM" if held == 1 else "disk"
    return _with_speeds(replace(fit, share=share, place=where), request, model, held)


def _with_speeds(fit: Fit, request: PlanRequest, model: ModelShape, held: float) -> Fit:
    """Return the fit with tokens a second where bandwidths tell them."""
    machine = request.place.machine
    if machine is None or model.shape.nbytes < TOY_NBYTES:
        return fit
    machine = with_disk(machine, held)
    bounds = Bounds.of(model, machine, fit.share, dense=request.dense, rows=request.num_clients)
    return replace(fit, least=bounds.share, most=bounds.all)


def _check_disk(fit: Fit, model: ModelShape, place: PlanPlace) -> None:
    """Raise OutOfResources where the files do not fit on the disk."""
    if place.disk_nbytes is not None and fit.files_nbytes > place.disk_nbytes:
        raise OutOfResources(
            f"{model.name} takes {human_bytes(fit.files_nbytes)} in {fit.quant}, and the disk has "
            f"{human_bytes(place.disk_nbytes)} free"
        )


def in_ram(place: PlanPlace, missing_nbytes: float) -> float:
    """Return the share of the experts outside the GPU's memory that RAM holds."""
    room = max(0, place.ram_nbytes - SYSTEM_NBYTES)
    return min(1.0, room / missing_nbytes) if missing_nbytes else 1.0


def with_disk(machine: Machine, held: float) -> Machine:
    """Return the machine whose link has the mean rate for experts of which so large a share lies
    in RAM, and the others on the disk."""
    if machine.is_unified or machine.load_s is not None:
        return machine
    mean = 1 / (held / machine.link_gbps + (1 - held) / min(SSD_GBPS, machine.link_gbps))
    return replace(machine, link_gbps=mean)


def lines(answer: PlanAnswer) -> Iterator[str]:
    """Yield the answer, in at most twelve lines."""
    yield f"{answer.needs.model.name} on {_place(answer.request.place)}"
    yield f"fits: {_verdict(answer.fits)}"
    yield f"{'':13}{'files':>10}{'in fast memory':>16}{'others':>8}{'tokens/s':>14}  loses"
    for fit in answer.fits:
        yield _row(fit, answer.request)
    yield from _apart(answer.needs.memory)
    if any(fit.least is not None for fit in answer.fits):
        yield "tokens/s: calculated from bytes; least: experts are wanted equally often"
    yield f"next: {command(answer)} (more: --details)"


def _place(place: PlanPlace) -> str:
    ram = f", {human_bytes(place.ram_nbytes)} of RAM" if place.ram_nbytes else ""
    assumed = "" if place.is_here or "--ram" in place.options or not ram else " (assumed)"
    free = place.disk_nbytes
    disk = "" if free is None else f", {human_bytes(free)} of disk free"
    return f"{place.shown}{ram}{assumed}{disk}"


def _verdict(fits: Sequence[Fit]) -> str:
    """Name the widest quant of each place."""
    widest = {fit.place: fit.quant for fit in reversed(fits) if fit.place}
    return ", ".join(
        f"{text} {'' if widest[place] == OWN else 'in '}{widest[place]}"
        for place, text in _PLACES.items()
        if place in widest
    )


def _row(fit: Fit, request: PlanRequest) -> str:
    share = f"{fit.share:.1%}" if fit.place else "-"
    where = {"": "no room", "GPU": "-"}.get(fit.place, fit.place)
    speed = "-"
    if fit.most is not None:
        low = f"{_rounded(fit.least)} to " if fit.share < 1 else "at most "
        speed = f"{low}{_rounded(fit.most)}"
    is_exact = fit.quant == OWN and request.dense is None and request.kv_cache_dtype == AUTO
    loses = "nothing" if is_exact else "not measured"
    files = human_bytes(fit.files_nbytes)
    return f"{fit.quant:13}{files:>10}{share:>16}{where:>8}{speed:>14}  {loses}"


def _rounded(value: float) -> str:
    return f"{float(f'{value:.2g}'):g}"


def _apart(needs: BackboneMemory) -> Iterator[str]:
    """Tell what the files have that is not in memory."""
    parts = {"tables read by row": needs.tables_nbytes, "MTP layers": needs.drafting_nbytes}
    told = [f"{human_bytes(nbytes)} of {what}" for what, nbytes in parts.items() if nbytes]
    if told:
        yield f"{OWN}, not in memory: {', '.join(told)}"


def command(answer: PlanAnswer) -> str:
    """Return the command that runs the best fit."""
    best = answer.best
    budget = "" if best.share == 1 else f" --budget {100 * best.share:.3g}%"
    dense = "" if answer.request.dense is None else f" --dense {answer.request.dense}"
    dtype = answer.request.kv_cache_dtype
    cache = f" --kv-cache-dtype {dtype}" * (dtype != AUTO)
    return f"{_named(answer.request.model, best.quant)}{budget}{dense}{cache}"


def _named(model: str, quant: str) -> str:
    """Return the command with the real name of a model in a quant."""
    if is_bundled(model):
        return "moectl run"
    repositories = REPOSITORIES.get(known_name(model) or "")
    if quant == OWN:
        return f"moectl run {repositories.hub if repositories else model}"
    if repositories and repositories.gguf:
        return f"moectl run {repositories.gguf}:{quant}"
    return f"find its GGUF on the hub, then moectl run OWNER/NAME:{quant}"
