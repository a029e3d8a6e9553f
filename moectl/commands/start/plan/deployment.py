"""A plan from a config alone: where a model runs, what fits into the memory there, and between
which speeds a run will be."""

from dataclasses import dataclass
from math import ceil

from artifacts.hardware.costs import DENSE_ON_GPU, Costs
from artifacts.hardware.machines import Machine
from artifacts.modelshapes.known import ModelShape
from artifacts.quantisation.replicas import in_memory
from artifacts.quantisation.widths import TRELLIS_WIDTHS, Width
from moectl.commands.start.plan.fitting import Bounds, Memory, PlanRequest, divided
from moectl.commands.start.plan.needs import needs_of
from moectl.show.grounds import TOY_NBYTES

# simulated: so many, of so many tokens
_REQUESTS = 4
_LENGTH = 128
_LEAST_LENGTH = 64
_MOST_TOKENS = 16_384
WIDEST = 1.5
"""Bits up to which a plan tries."""


@dataclass(frozen=True, slots=True)
class Shadowed:
    """Every expert at `bits` bits in `nbytes`, and `share` of the experts whole beside them, in the
    checkpoint's own format. `tokens_per_s`, where bandwidths are known: nothing is waited for, and
    experts are wanted equally often."""

    bits: Width
    nbytes: int
    share: float
    tokens_per_s: float | None


def shadowed(
    model: ModelShape, room_nbytes: int, chosen: Machine | None, *, dense: int | None
) -> list[Shadowed]:
    """Return a row for each width at which every expert fits into `room_nbytes`, by rising bits; no
    rows where all experts fit whole."""
    shape = model.shape
    rows = []
    if room_nbytes >= shape.nbytes:
        return rows
    for bits in (bits for bits in TRELLIS_WIDTHS if bits <= WIDEST):
        replica = replica_nbytes(model, bits)
        left = room_nbytes - replica * shape.num_keys
        if left < 0 or replica >= shape.expert_nbytes:
            break
        share = min(1.0, left // shape.expert_nbytes / shape.num_keys)
        speed = chosen and _speed(
            model, Costs.of(model, chosen).with_dense(dense), share, replica / shape.expert_nbytes
        )
        rows.append(Shadowed(bits, replica * shape.num_keys, share, speed))
    return rows


def replica_nbytes(model: ModelShape, bits: Width) -> int:
    """Bytes of one expert's replica, all tensors counted."""
    return in_memory(ceil(model.shape.expert_nbytes / model.weight_nbytes * bits / 8))


def _speed(model: ModelShape, costs: Costs, share: float, of_bytes: float) -> float:
    shape = model.shape
    expert_s = share * costs.expert.seconds(1) + (1 - share) * costs.expert.seconds(
        1, share=of_bytes
    )
    return 1 / (
        costs.head.seconds(1) + shape.num_layers * (costs.rest.seconds(1) + shape.top_k * expert_s)
    )


@dataclass(frozen=True, slots=True)
class Expected:
    """A preset on synthetic routers: times with the usual ones, tokens per second from the slowest
    to the fastest.

    `alters` names what makes the output differ from the full model's, empty where nothing does.
    `moved_nbytes` is per token. `needs` are the artefacts that a checkpoint must have first;
    `is_study`: it is there for comparison (a control, a baseline, hardware that is not sold).
    """

    preset: str
    tokens_per_s: float | None = None
    least: float | None = None
    most: float | None = None
    tpot_ms: float | None = None
    hit_rate: float | None = None
    moved_nbytes: int | None = None
    alters: str = ""
    why: str = ""
    needs: tuple[str, ...] = ()
    is_study: bool = False


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """A plan for a model on a place.

    `rows` are sorted by speed; presets that could not be tried come last, with the reason. `rows`
    is empty if no preset was simulated. `bounds` is None if no bandwidths are known. `shadows` are
    the ways to keep every expert resident.
    """

    request: PlanRequest
    model: ModelShape
    memory: Memory
    bounds: Bounds | None
    shadows: list[Shadowed]
    rows: list[Expected]
    simulated_layers: int
    assumed: tuple[str, ...]

    @property
    def machine(self) -> Machine | None:
        return self.request.place.machine

    @property
    def is_toy(self) -> bool:
        """True if the model is so small that a data sheet predicts only ratios of its times."""
        return self.memory.all_experts_nbytes < TOY_NBYTES

    @property
    def offered(self) -> list[Expected]:
        """Presets that a user may choose from."""
        return [row for row in self.rows if not row.why and not row.is_study]

    @property
    def exact(self) -> Expected | None:
        """The fastest preset that alters nothing."""
        return next((row for row in self.rows if not row.why and not row.alters), None)

    @property
    def fastest(self) -> Expected | None:
        return next((row for row in self.rows if not row.why), None)


def requests_of(num_clients: int) -> dict[str, int]:
    """Return the dials of a synthetic trace with at least `num_clients` requests, so that no client
    repeats one, within a number of tokens."""
    requests = max(_REQUESTS, num_clients)
    return {
        "requests": requests,
        "tokens": requests * max(_LEAST_LENGTH, min(_LENGTH, _MOST_TOKENS // requests)),
    }


def plan_deployment(request: PlanRequest) -> DeploymentPlan:
    """Divide the memory, and tell between which speeds a run will be.

    Raises BadUsage or BadInput for an unknown model, OutOfResources when less than one expert per
    layer fits.
    """
    needs = needs_of(request.model, request.dense)
    model = needs.model
    place = request.place
    memory = divided(request, model, needs.memory)
    bounds = place.machine and Bounds.of(
        model, place.machine, memory.share, dense=request.dense, rows=request.num_clients
    )
    notes = () if request.dense is None else (DENSE_ON_GPU.format(bits=request.dense),)
    shadows = shadowed(model, memory.experts_nbytes, place.machine, dense=request.dense)
    return DeploymentPlan(request, model, memory, bounds, shadows, [], 0, (*model.assumed, *notes))
