"""Division of a place's memory by what a model needs, and the speeds between which a run will be,
both from bytes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from artifacts.errors import BadUsage, OutOfResources
from artifacts.formats.dense import check_dense
from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import MACHINES, Machine
from artifacts.modelshapes import kv_cache
from artifacts.modelshapes.known import ModelShape
from artifacts.modelshapes.memory import BackboneMemory
from moectl.commands.start.plan.place import PlanPlace
from moectl.show.sizes import human_bytes

if TYPE_CHECKING:  # numpy takes longer to import than a plan takes
    from artifacts.traces.clients import Clients

RESERVE_NBYTES = 1 << 30  # for the driver, activations and buffers


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The attention cache holds `context` tokens for each of the `clients`, by default one; linear
    layers besides experts and routers have `dense` bits if that is given."""

    model: str
    place: PlanPlace
    context: int = 4096
    dense: int | None = None
    clients: "Clients | None" = None
    kv_cache_dtype: str = kv_cache.AUTO

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
        kv_cache.kv_bits(self.kv_cache_dtype)
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


def divided(request: PlanRequest, model: ModelShape, needs: BackboneMemory) -> Memory:
    """Return the bytes left for experts. Raises OutOfResources, naming the memory that would do."""
    share = kv_cache.kept_share(kv_cache.kv_bits(request.kv_cache_dtype), model.dtype_nbytes)
    cache = round(needs.cache_nbytes * request.num_cached * share)
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
        "--kv-cache-dtype int8": request.kv_cache_dtype == kv_cache.AUTO,
    }
    return " or ".join(way for way, is_left in ways.items() if is_left)
