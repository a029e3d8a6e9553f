"""A plan from a config alone: where a model runs, what fits into the memory there, and between
which speeds a run will be."""

from dataclasses import dataclass
from math import ceil

from artifacts.errors import BadUsage, OutOfResources
from artifacts.formats.dense import check_dense
from artifacts.hardware.costs import DENSE_ON_GPU, Costs
from artifacts.hardware.machines import MACHINES, Machine
from artifacts.modelshapes.known import ModelShape
from artifacts.modelshapes.memory import BackboneMemory
from artifacts.quantisation.replicas import in_memory
from artifacts.quantisation.widths import TRELLIS_WIDTHS, Width
from artifacts.traces.clients import Clients
from moectl.commands.start.plan.needs import needs_of
from moectl.commands.start.plan.place import PlanPlace
from moectl.show.grounds import TOY_NBYTES
from moectl.show.render import human_bytes

RESERVE_NBYTES = 1 << 30  # for the driver, activations and buffers
# simulated: so many, of so many tokens
_REQUESTS = 4
_LENGTH = 128
_LEAST_LENGTH = 64
_MOST_TOKENS = 16_384
WIDEST = 1.5
"""Bits up to which a plan tries."""


def smallest_with(nbytes: int) -> str:
    """Say which known machine is the smallest with so much memory."""
    large = [
        each
        for each in MACHINES.values()
        if each.fast_gb is not None and each.fast_gb * 1e9 >= nbytes
    ]
    if not large:
        return "no machine that moectl knows has that much"
    smallest = min(large, key=lambda each: each.fast_gb)
    return f"the smallest known machine with that much is {smallest.name} ({smallest.fast_gb:g} GB)"


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
class PlanRequest:
    """The attention cache holds `context` tokens for each of the `clients`, by default one; linear
    layers besides experts and routers have `dense` bits if that is given."""

    model: str
    place: PlanPlace
    context: int = 4096
    dense: int | None = None
    clients: Clients | None = None

    @property
    def num_clients(self) -> int:
        return self.clients.count if self.clients else 1

    @property
    def num_cached(self) -> int:
        """Tokens that the attention cache holds."""
        return self.context * self.num_clients

    @property
    def cached(self) -> str:
        each = f"{self.num_clients} x " if self.num_clients > 1 else ""
        return f"{each}{self.context:,} tokens"

    @property
    def shown_clients(self) -> str:
        return (
            f"{self.num_clients if self.num_clients > 1 else 'one'} "
            f"request{'s' * (self.num_clients > 1)} at a time"
        )

    def __post_init__(self) -> None:
        check_dense(self.dense)
        if self.context < 1:
            raise BadUsage(f"--context {self.context}: a context is one token or more")


@dataclass(frozen=True, slots=True)
class Memory:
    """Division of a GPU's memory.

    `experts_nbytes` is the part left for experts; all of them take `all_experts_nbytes`, as in the
    files. The other weights take `stored_weights_nbytes` in the files and `weights_nbytes` in
    memory. The files' `tables_nbytes` are read by row, and `drafting_nbytes` are layers that
    predict further tokens.
    """

    vram_nbytes: int
    weights_nbytes: int
    stored_weights_nbytes: int
    cache_nbytes: int
    reserve_nbytes: int
    experts_nbytes: int
    all_experts_nbytes: int
    tables_nbytes: int = 0
    drafting_nbytes: int = 0

    @property
    def share(self) -> float:
        """The share of all experts that fits, at most 1."""
        return min(1.0, self.experts_nbytes / self.all_experts_nbytes)

    @property
    def files_nbytes(self) -> int:
        """Bytes of the checkpoint's files."""
        return self.stored_weights_nbytes + self.all_experts_nbytes

    @property
    def whole_nbytes(self) -> int:
        """Bytes of a GPU that would hold everything."""
        return (
            self.weights_nbytes + self.cache_nbytes + self.reserve_nbytes + self.all_experts_nbytes
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """Tokens per second of all requests together, if a step waits for every expert that is not in
    the GPU's memory.

    There are three cases: with no expert there; with the share that fits, experts being wanted
    equally often; and with all of them there.
    """

    none: float
    share: float
    all: float

    @classmethod
    def of(
        cls,
        model: ModelShape,
        chosen: Machine,
        share: float,
        *,
        dense: int | None = None,
        rows: int = 1,
    ) -> "Bounds":
        """Estimate them from bytes and bandwidths, `rows` requests at a time."""
        costs = Costs.of(model, chosen).with_dense(dense)
        shape = model.shape
        distinct = shape.num_distinct(rows)
        expert_s = distinct * costs.expert.seconds(rows * shape.top_k / distinct)
        computed = costs.head.seconds(rows) + shape.num_layers * (
            costs.rest.seconds(rows) + expert_s
        )
        loaded = shape.num_layers * distinct * (costs.load_latency_s + costs.load_s)
        return cls(*(rows / (computed + misses * loaded) for misses in (1.0, 1 - share, 0.0)))


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


def divided(request: PlanRequest, model: ModelShape, needs: BackboneMemory) -> Memory:
    """Return the bytes left for experts. Raises OutOfResources, naming the memory that would do."""
    cache = needs.cache_nbytes * request.num_cached
    shape = model.shape
    taken = needs.weights_nbytes + cache + RESERVE_NBYTES
    least = taken + shape.num_layers * shape.expert_nbytes
    if request.place.vram_nbytes < least:
        raise OutOfResources(
            f"{model.name} does not fit into {request.place.shown}: it takes {human_bytes(least)} "
            f"at least, {human_bytes(needs.weights_nbytes)} of weights besides experts, "
            f"{human_bytes(cache)} of attention cache for {request.cached}, "
            f"{human_bytes(RESERVE_NBYTES)} in reserve and one expert a layer; "
            f"{smallest_with(least)}; {_ways_to_less(request)} takes less"
        )
    return Memory(
        vram_nbytes=request.place.vram_nbytes,
        weights_nbytes=needs.weights_nbytes,
        stored_weights_nbytes=needs.stored_nbytes,
        cache_nbytes=cache,
        reserve_nbytes=RESERVE_NBYTES,
        experts_nbytes=request.place.vram_nbytes - taken,
        all_experts_nbytes=shape.nbytes,
        tables_nbytes=needs.tables_nbytes,
        drafting_nbytes=needs.drafting_nbytes,
    )


def _ways_to_less(request: PlanRequest) -> str:
    ways = {
        "a shorter --context": True,
        "fewer --clients": request.num_clients > 1,
        "--dense 4": not request.dense,
    }
    return " or ".join(way for way, is_left in ways.items() if is_left)
