"""A plan from a config alone: what fits into a GPU's memory, and between which speeds a run will
be."""

from dataclasses import dataclass

from artifacts.errors import BadUsage, OutOfResources
from artifacts.formats.dense import check_dense
from artifacts.hardware.costs import DENSE_ON_GPU, Costs
from artifacts.hardware.machines import Machine
from artifacts.modelshapes.known import ModelShape, model_shape
from artifacts.modelshapes.memory import BackboneMemory, backbone_memory, backbone_of
from artifacts.traces.clients import Clients
from moectl.commands.start.plan.place import PlanPlace, smallest_with
from moectl.commands.start.plan.shadows import Shadowed, shadowed
from moectl.show.grounds import TOY_NBYTES
from moectl.show.render import human_bytes
from runtime.model.gguf_shape import gguf_shape
from runtime.model.locate import local_gguf

RESERVE_NBYTES = 1 << 30  # for the driver, activations and buffers


# simulated: so many, of so many tokens
_REQUESTS = 4
_LENGTH = 128
_LEAST_LENGTH = 64
_MOST_TOKENS = 16_384


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
    memory.
    """

    vram_nbytes: int
    weights_nbytes: int
    stored_weights_nbytes: int
    cache_nbytes: int
    reserve_nbytes: int
    experts_nbytes: int
    all_experts_nbytes: int

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
    model, needs = _costs(request.model, request.dense)
    place = request.place
    memory = divided(request, model, needs)
    bounds = place.machine and Bounds.of(
        model, place.machine, memory.share, dense=request.dense, rows=request.num_clients
    )
    notes = () if request.dense is None else (DENSE_ON_GPU.format(bits=request.dense),)
    shadows = shadowed(model, memory.experts_nbytes, place.machine, dense=request.dense)
    return DeploymentPlan(request, model, memory, bounds, shadows, [], 0, (*model.assumed, *notes))


def _costs(name: str, dense: int | None) -> tuple[ModelShape, BackboneMemory]:
    """Return the shape of a model, and the memory that it needs beside experts."""
    if file := local_gguf(name):
        return gguf_shape(file, dense=dense)
    model = model_shape(name)
    return model, backbone_memory(model, backbone_of(name), dense=dense)


def divided(request: PlanRequest, model: ModelShape, needs: BackboneMemory) -> Memory:
    """Return the bytes left for experts. Raises OutOfResources, naming the memory that would do."""
    cache = needs.cache_nbytes * request.num_cached
    shape = model.shape
    taken = needs.weights_nbytes + cache + RESERVE_NBYTES
    least = taken + shape.num_layers * shape.expert_nbytes
    if request.place.vram_nbytes < least:
        ways = {
            "a shorter --context": True,
            "fewer --clients": request.num_clients > 1,
            "--dense 4": not request.dense,
        }
        less = f"{' or '.join(way for way, is_left in ways.items() if is_left)} takes less"
        raise OutOfResources(
            f"{model.name} does not fit into {request.place.shown}: it takes {human_bytes(least)} "
            f"at least, {human_bytes(needs.weights_nbytes)} of weights besides experts, "
            f"{human_bytes(cache)} of attention cache for {request.cached}, "
            f"{human_bytes(RESERVE_NBYTES)} in reserve and one expert a layer; "
            f"{smallest_with(least)}; {less}"
        )
    return Memory(
        vram_nbytes=request.place.vram_nbytes,
        weights_nbytes=needs.weights_nbytes,
        stored_weights_nbytes=needs.stored_nbytes,
        cache_nbytes=cache,
        reserve_nbytes=RESERVE_NBYTES,
        experts_nbytes=request.place.vram_nbytes - taken,
        all_experts_nbytes=shape.nbytes,
    )
