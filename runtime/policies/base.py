"""The contracts of the five axes, and what a policy may see: ids, scores, states and step numbers,
but no device and no clock.

Shapes: T tokens, K selected per token, E experts a layer, L MoE layers, D prefetch distances.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from artifacts.errors import BadUsage
from artifacts.quantisation.replicas import Replicas
from artifacts.routing.expert_maps import ExpertMaps
from artifacts.routing.predictors import Predictors
from artifacts.shape import Shape
from artifacts.splits.solve import SolvedSplit
from artifacts.traces.next_use import NextUse
from runtime.policies.shared.maps import Matching
from runtime.policies.step import Now, Opening, Step, most_wanted


def check_choice(policy: str, setting: str, value: object, *known: str) -> None:
    """Raise BadUsage unless a setting of a policy has one of the known values."""
    if value not in known:
        raise BadUsage(f"{policy}: {setting} is {' or '.join(known)}, not {value!r}")


@dataclass(frozen=True, slots=True)
class Origin:
    """The run that wrote an artefact, for a receipt. `note` says with what settings an older run of
    its command was made, if they differ: the newest is taken."""

    run: int
    command: str
    data_digest: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Artefacts:
    """Artefacts of this model that policies may read. A policy names in `requires` the ones that it
    cannot run without."""

    buddies: np.ndarray | None = None  # [L, E, R] expert ids by rank, padded with -1
    buddy_q: np.ndarray | None = None  # [L, E, R] their share of what ranked them
    # the same two, ranked by co-activation
    coactivated: tuple[np.ndarray, np.ndarray] | None = None
    entropy: np.ndarray | None = None  # [L, 101] percentiles of token activating entropy
    # [E] devices between an expert and the compute; None: one device
    hops: np.ndarray | None = None
    next_use: NextUse | None = None  # the future of the trace that is replayed
    replicas: Replicas | None = None  # sizes and losses of experts below full precision
    # solved splits for some budgets, the newest first
    splits: tuple[SolvedSplit, ...] | None = None
    # [L, E + 1] experts that a token loads on demand, by experts that a layer holds
    loads: np.ndarray | None = None
    # [L] a layer's sensitivity to dropped experts, 1 on average
    sensitivity: np.ndarray | None = None
    # they predict the layers ahead; a replay reads predictions from its trace
    predictors: Predictors | None = None
    maps: ExpertMaps | None = None  # earlier iterations, which the current one is matched with
    maps_run: int | None = None  # the store's run that made the maps
    origins: Mapping[str, Origin] = field(default_factory=dict)  # by the name of the artefact
    learns_maps: bool = False  # whether iterations of this run are added to the maps
    # of those maps: made when policies are prepared, and shared by them
    matching: Matching | None = None


_STORED = "which the store does not hold: "
REMEDY = {  # by the artefact that a policy requires and the store lacks
    "buddies": _STORED + "run `moectl profile` on this model, then `moectl build-buddies`",
    "coactivated": _STORED
    + "run `moectl profile` on this model, then `moectl build-buddies --metric coactivation`",
    "entropy": _STORED + "run `moectl profile` on this model",
    "next_use": "the future of a trace: it runs in the simulator only, with `moectl simulate`",
    "splits": _STORED + "run `moectl split`",
    "replicas": _STORED + "run `moectl quantize` on this model",
    "predictors": _STORED + "run `moectl build-predictor` on this model",
    "maps": _STORED + "run `moectl build-maps` on this model, or begin with none by --learn",
}


@dataclass(slots=True)
class Residents:
    """The states of one layer's experts at one step."""

    resident: np.ndarray  # [E] bool
    absent: np.ndarray  # [E] bool; experts that are neither are loading
    num_free: Sequence[int]  # empty slots of this layer's scope, on each device
    busy: float = 0.0  # the part of an expert that the link has to move before a demand load
    room: float = 0.0  # experts that the link moves in a step beyond those under way

    def coming(self, step: Step) -> list[int]:
        """Return the distinct experts that a step of this layer wants and that are loading."""
        loading = ~(self.resident | self.absent)
        return np.unique(step.selected[loading[step.selected]]).tolist()

    def missing(self, step: Step) -> list[int]:
        """Return the distinct absent experts that a step of this layer wants, those of most tokens
        first, equals in order of first appearance."""
        return most_wanted(
            list(dict.fromkeys(step.selected[self.absent[step.selected]].tolist())), step.selected
        )


@dataclass(slots=True)
class Choice:
    """A miss policy's decision for one step. Absent experts in `selected` are fetched, unless they
    are computed in the near tier or on their resident low-bit replicas."""

    selected: np.ndarray  # [T, K] with stand-ins; -1 where a rank is dropped
    near: frozenset[int] = frozenset()
    low: frozenset[int] = frozenset()
    behind: tuple[int, ...] = ()  # absent experts to load while others are computed, best first
    weights: np.ndarray | None = None  # [T, K] new routing weights; None keeps the router's own
    bits: Mapping[int, int] | None = None  # precision of fetched experts; 16 for those not named
    # experts that the link has time to load besides, while near ones are computed
    lent: float = 0.0

    def is_elsewhere(self, expert: int) -> bool:
        """Return whether the expert is computed without a slot."""
        return expert in self.near or expert in self.low


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Experts cut in two: the top of an expert of layer l has `top_neurons[l]` neurons, all of them
    if the layer is not cut.

    Slots hold `num_tops[l]` tops of each layer, and `num_bottoms` bottoms of any layer. `solved`:
    the solved split that it follows, if any.
    """

    top_neurons: np.ndarray  # [L]
    num_tops: np.ndarray  # [L]
    num_bottoms: int
    solved: SolvedSplit | None = None


@dataclass(frozen=True, slots=True)
class FastTier:
    """Contents of the fast tier for a budget: slots, for experts or for the segments of a `split`,
    and resident replicas beside them, whose bits are `shadows` [L * E]."""

    num_slots: int
    shadows: np.ndarray | None = None
    split: Split | None = None

    def slots_nbytes(self, shape: Shape) -> int:
        """Return the bytes of all slots, without alignment."""
        if self.split is None:
            return self.num_slots * shape.expert_nbytes
        sizes = [shape.segment_nbytes(neurons) for neurons in self.split.top_neurons.tolist()]
        tops = sum(
            count * top for count, (top, _) in zip(self.split.num_tops.tolist(), sizes, strict=True)
        )
        return tops + self.split.num_bottoms * max(bottom for _, bottom in sizes)

    def holds(self, shape: Shape) -> bool:
        """Return whether every expert fits, whole or in its segments."""
        split = self.split
        if split is None:
            return self.num_slots == shape.num_keys
        num_cut = sum(
            bottom > 0 for _, bottom in map(shape.segment_nbytes, split.top_neurons.tolist())
        )
        return self.num_slots == shape.num_keys + num_cut * shape.num_experts


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of one layer: the experts that are to be resident, and the bits [E] at which the
    others are computed near.

    If the placement `is_awaited`, its experts count as resident at once, and compute waits for
    those that it uses.
    """

    resident: np.ndarray
    near_bits: np.ndarray
    is_awaited: bool = False


class Policy(Protocol):
    """Every policy is a dataclass whose fields are its parameters. `prepare` runs once, before the
    first step."""

    requires: ClassVar[frozenset[str]]  # names of the `Artefacts` it cannot run without
    wants: ClassVar[frozenset[str]]  # `requires`, and others that it uses if they exist
    fallbacks: Collection[str]  # known once prepared: a note on each artefact that it does without
    sees_probabilities: bool  # whether steps must carry the router's probabilities
    sees_embeddings: bool  # whether steps must carry the input embeddings of the pass
    named_widths: Collection[int]  # bits below full precision that its parameters name
    widths: Collection[int]  # known once prepared: the bits below full precision that it may load

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None: ...


class Routing(Policy, Protocol):
    """Runs at the router, before anything else is decided."""

    reroutes: ClassVar[bool]  # False: the router's own choice is used, and `route` is never called
    follows_predictions: ClassVar[bool]  # whether steps must carry `predicted`

    def route(self, step: Step, resident: np.ndarray) -> Step:
        """Return the step with the experts and weights that are to serve it; `resident` [E]
        bool."""


class Eviction(Policy, Protocol):
    """Keeps its own history of every key, resident or not, and ranks residents by it."""

    # Known once prepared: sort keys [L * E] of all keys, float64 and int64, which `order` selects
    # from; None if there are no such arrays.
    ranks: tuple[np.ndarray, np.ndarray] | None
    follows_proposals: ClassVar[bool]  # whether `proposed` is to be called
    # The parameters of lcp under which uses rank keys as this policy does; None if it goes by
    # something else.
    as_lcp: Mapping[str, object] | None

    def queues(self) -> Sequence[Iterable[int]] | None:
        """Return for each layer all its keys in eviction order, kept up to date from here on; None
        if the policy keeps no such order. Called once, before the first step, and only if layers
        have slots of their own."""

    def fetched(self, bits: Mapping[int, int], now: Now) -> None:
        """Note that this step fetches keys at these bits. Called before `used`, and only if the
        miss policy picks bits."""

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        """Note that this step uses `keys`, in order of first appearance, in whatever tier. Called
        before any `order`."""

    def prefetched(self, keys: list[int], now: Now) -> None:
        """Note that this step prefetches `keys`."""

    def proposed(self, keys: list[int], now: Now) -> None:
        """Note what the prefetch policy proposes in this step, whether absent, loading or resident.
        Called before any of it is sent for."""

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        """Return sort keys, most significant first, by which `keys` (ascending) are evicted; ties
        go by the lower key."""


class Miss(Policy, Protocol):
    chooses: ClassVar[bool]  # False: absent experts are fetched, and `choose` need not be called
    every_step: ClassVar[bool]  # False: `choose` is called only when a wanted expert is absent
    reads_shadows: ClassVar[bool]  # whether choices name experts in `low`
    loads_behind: ClassVar[bool]  # whether choices name experts in `behind`
    ratio_is_open: bool  # whether the bandwidth of the link over the near tier's is the machine's

    def choose(self, step: Step, residents: Residents) -> Choice:
        """Choose what becomes of absent experts. Loading experts are waited for unless they are
        near or low."""


class Prefetch(Policy, Protocol):
    distance: int  # layers that it looks ahead; 0: it proposes nothing
    reads_predictions: ClassVar[bool]  # whether steps must carry `predicted` for `distance` layers
    reads_learned: ClassVar[bool]  # whether steps must carry `learned` for `distance` layers
    reads_foretold: ClassVar[bool]  # whether it uses what steps carry in `foretold`
    follows_steps: ClassVar[
        bool
    ]  # False: it remembers nothing, and is asked only where something can be sent
    opens_passes: bool  # whether it proposes before the first layer of a pass

    def propose_first(self, opening: Opening, now: Now) -> np.ndarray:
        """Return keys to prefetch before the first layer has run, as `propose` does. Called once a
        pass, and only if it `opens_passes`."""

    def propose(self, step: Step, now: Now) -> np.ndarray:
        """Return keys to prefetch, best first. Keys that are loading or resident are kept from
        eviction, and not loaded again."""


class Residency(Policy, Protocol):
    def capacities(self, num_slots: int, shape: Shape) -> np.ndarray:
        """Return the slots [L] of each layer, in layer scope."""

    def share(self, budget_nbytes: int) -> FastTier | None:
        """Return how the budget is divided between slots and resident replicas; None: slots only.
        Raises BadUsage if it is too small."""

    cuts: ClassVar[bool]  # whether `share` returns a split
    places: ClassVar[bool]  # whether it observes steps and places experts

    def observe(self, step: Step) -> None:
        """Observe a step. Called at every step, before anything is decided."""

    def place(self, step: Step, num_slots: Sequence[int]) -> Placement | None:
        """Return what is to be resident in the step's layer from now on; None: no change. Called at
        every step after `observe`; `num_slots`: the layer's, on each device."""


class Simple:
    """The defaults of most policies: nothing required, nothing to prepare, no probabilities, full
    precision."""

    requires: ClassVar[frozenset[str]] = frozenset()
    fallbacks: ClassVar[Collection[str]] = ()
    sees_probabilities: ClassVar[bool] = False
    sees_embeddings: ClassVar[bool] = False
    reads_learned: ClassVar[bool] = False
    reads_foretold: ClassVar[bool] = False
    named_widths: ClassVar[Collection[int]] = ()
    widths: ClassVar[Collection[int]] = ()
    chooses: ClassVar[bool] = True
    every_step: ClassVar[bool] = False
    reads_shadows: ClassVar[bool] = False
    loads_behind: ClassVar[bool] = False
    ratio_is_open: ClassVar[bool] = False
    follows_steps: ClassVar[bool] = True
    opens_passes: ClassVar[bool] = False
    follows_predictions: ClassVar[bool] = False

    @property
    def wants(self) -> frozenset[str]:
        """Artefacts that the policy uses if they exist; by default only the ones that it
        requires."""
        return self.requires

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        """Do nothing by default."""


class SimpleEviction(Simple):
    """An eviction policy that notes uses only."""

    ranks: ClassVar[None] = None
    follows_proposals: ClassVar[bool] = False
    as_lcp: ClassVar[None] = None

    def queues(self) -> None:
        """Return None: no queues are kept."""

    def fetched(self, bits: Mapping[int, int], now: Now) -> None:
        """Do nothing: fetches are not noted."""

    def prefetched(self, keys: list[int], now: Now) -> None:
        """Do nothing: prefetches are not noted."""

    def proposed(self, keys: list[int], now: Now) -> None:
        """Do nothing: proposals are not noted."""


class SimpleResidency(Simple):
    """Slots only, the same number in every layer; the remainder goes to the lower layers."""

    cuts: ClassVar[bool] = False
    places: ClassVar[bool] = False

    def capacities(self, num_slots: int, shape: Shape) -> np.ndarray:
        per_layer, rest = divmod(num_slots, shape.num_layers)
        return np.array([per_layer + (layer < rest) for layer in range(shape.num_layers)], np.int64)

    def share(self, budget_nbytes: int) -> FastTier | None:
        return None

    def observe(self, step: Step) -> None:
        """Do nothing: steps are not noted."""

    def place(self, step: Step, num_slots: Sequence[int]) -> Placement | None:
        return None
