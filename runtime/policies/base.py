"""The contracts of the five axes, and what a policy may see: ids, scores, states and step numbers; never a device or
a clock.

Shapes: T tokens, K selected per token, E experts a layer, L MoE layers, D prefetch distances.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from artifacts.quantisation.replicas import Replicas
from artifacts.routing.expert_maps import ExpertMaps
from artifacts.routing.predictors import Predictors
from artifacts.shape import Shape
from artifacts.splits.solve import SolvedSplit
from artifacts.traces.next_use import NextUse
from runtime.policies.shared.maps import Matching
from runtime.policies.step import Step


@dataclass(slots=True)
class Now:
    """Where the run is: steps, passes and tokens count up for ever, those of the current step included."""

    step: int = -1
    pass_index: int = -1
    layer: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Artefacts:
    """What the store knows of this model; a policy names in `requires` what it cannot do without."""

    buddies: np.ndarray | None = None  # [L, E, R] expert ids by rank, padded with -1
    buddy_q: np.ndarray | None = None  # [L, E, R] their conditional co-activation
    entropy: np.ndarray | None = None  # [L, 101] percentiles of token activating entropy
    hops: np.ndarray | None = None  # [E] devices between an expert and the compute; None: one device
    next_use: NextUse | None = None  # the future of the trace that is replayed
    replicas: Replicas | None = None  # what experts take and lose below their full precision
    splits: tuple[SolvedSplit, ...] | None = None  # what was solved for some budgets, the newest first
    loads: np.ndarray | None = None  # [L, E + 1] experts that a token loads on demand, by experts that a layer holds
    sensitivity: np.ndarray | None = None  # [L] of layers to what is left out of them, 1 on average
    predictors: Predictors | None = None  # what foresees the layers ahead; in a replay the trace tells
    maps: ExpertMaps | None = None  # earlier iterations, to match the one under way with
    maps_run: int | None = None  # the run of the store that they are of
    learns_maps: bool = False  # whether iterations join them as the run goes on
    matching: Matching | None = None  # of those maps: made when policies are prepared, and shared by them


@dataclass(slots=True)
class Residents:
    """The states of one layer's experts at one step."""

    resident: np.ndarray  # [E] bool
    absent: np.ndarray  # [E] bool; what is neither is on its way
    num_free: Sequence[int]  # slots of this layer's scope that hold nothing, on each device

    def missing(self, step: Step) -> list[int]:
        """Distinct absent experts that a step of this layer wants, in order of first appearance."""
        return list(dict.fromkeys(step.selected[self.absent[step.selected]].tolist()))


def fitting(experts: Sequence[int], room: Sequence[int]) -> list[int]:
    """Of a layer's experts those for which there is room on their devices, first come first served: expert e belongs to
    device e % N, which has room [N] for so many."""
    if len(room) == 1:
        return list(experts[: room[0]])
    left, found = list(room), []
    for expert in experts:
        device = expert % len(left)
        if left[device]:
            left[device] -= 1
            found.append(expert)
    return found


@dataclass(slots=True)
class Choice:
    """What a miss policy makes of a step: absent experts that `selected` still names are fetched, unless they are
    computed near their memory or on the low replica that stays in the fast tier."""

    selected: np.ndarray  # [T, K] stand-ins in place, -1 where a rank is dropped
    near: frozenset[int] = frozenset()
    low: frozenset[int] = frozenset()
    behind: tuple[int, ...] = ()  # absent experts to bring while others compute, best first
    weights: np.ndarray | None = None  # [T, K] new routing weights; None keeps the router's own
    bits: Mapping[int, int] | None = None  # precision of what is fetched; 16 for those not named
    lent: float = 0.0  # experts that the link has time to bring, beside what is fetched, while near ones are computed

    def is_elsewhere(self, expert: int) -> bool:
        """Whether it is computed without a slot."""
        return expert in self.near or expert in self.low


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Experts cut in two: of layer l, `top_neurons[l]` are in the top, all of them where it is not cut.

    Slots hold `num_tops[l]` tops of each layer, and `num_bottoms` bottoms of any. `solved`: what it follows, if it was
    solved.
    """

    top_neurons: np.ndarray  # [L]
    num_tops: np.ndarray  # [L]
    num_bottoms: int
    solved: SolvedSplit | None = None


@dataclass(frozen=True, slots=True)
class FastTier:
    """What a budget holds: slots, for experts or for the segments of a `split`, and beside them replicas that stay,
    `shadows` [L * E] the bits of each expert's."""

    num_slots: int
    shadows: np.ndarray | None = None
    split: Split | None = None

    def slots_nbytes(self, shape: Shape) -> int:
        """Bytes of all slots, what borders cost not counted."""
        if self.split is None:
            return self.num_slots * shape.expert_nbytes
        sizes = [shape.segment_nbytes(neurons) for neurons in self.split.top_neurons.tolist()]
        tops = sum(count * top for count, (top, _) in zip(self.split.num_tops.tolist(), sizes, strict=True))
        return tops + self.split.num_bottoms * max(bottom for _, bottom in sizes)

    def holds(self, shape: Shape) -> bool:
        """Whether every expert fits, whole or in its segments."""
        split = self.split
        if split is None:
            return self.num_slots == shape.num_keys
        num_cut = sum(bottom > 0 for _, bottom in map(shape.segment_nbytes, split.top_neurons.tolist()))
        return self.num_slots == shape.num_keys + num_cut * shape.num_experts


@dataclass(frozen=True, slots=True)
class Placement:
    """Of one layer: the experts that are to be resident, and the bits [E] at which the others are computed near."""

    resident: np.ndarray
    near_bits: np.ndarray


class Policy(Protocol):
    """Every policy is a dataclass whose fields are its parameters. `prepare` runs once, before the first step."""

    requires: ClassVar[frozenset[str]]  # names of `Artefacts` it cannot do without
    wants: ClassVar[frozenset[str]]  # names of those, and of others that it takes where there are any
    fallbacks: Collection[str]  # once prepared, a line on each that it had to do without
    sees_probabilities: bool  # whether steps must carry the router's probabilities
    sees_embeddings: bool  # whether steps must carry what the pass was given
    widths: Collection[int]  # once prepared, the bits below full precision that it may ask the slow tier for

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None: ...


class Routing(Policy, Protocol):
    """Runs at the router, before anything else is decided."""

    reroutes: ClassVar[bool]  # False: the router's own choice stands, and `route` is never called
    follows_predictions: ClassVar[bool]  # whether steps must carry `predicted`

    def route(self, step: Step, resident: np.ndarray) -> Step:
        """The step with the experts, and their weights, that are to serve it; `resident` [E] bool."""


class Eviction(Policy, Protocol):
    """Keeps what it wants to know of every key, whether resident or not, and ranks residents by it."""

    # Once prepared, [L * E] float64 and int64 by key: what `order` says of any keys, where that lies ready; else None
    ranks: tuple[np.ndarray, np.ndarray] | None

    def fetched(self, bits: Mapping[int, int], now: Now) -> None:
        """This step fetches these keys at so many bits. Before `used`, and only if the miss policy picks bits."""

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        """This step uses `keys`, in order of first appearance, wherever they are computed. Comes before any `order`."""

    def prefetched(self, keys: list[int], now: Now) -> None:
        """This step brings `keys` ahead of their use."""

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        """Sort keys, most significant first, by which `keys` (ascending) are evicted; equals go by the lower key."""


class Miss(Policy, Protocol):
    chooses: ClassVar[bool]  # False: what is absent is fetched, and `choose` need not be called
    every_step: ClassVar[bool]  # False: `choose` is called only when something wanted is absent
    reads_shadows: ClassVar[bool]  # whether choices name experts in `low`, or to be brought `behind`

    def choose(self, step: Step, residents: Residents) -> Choice:
        """What becomes of what is wanted and not there. What is on its way is waited for unless near or low."""


class Prefetch(Policy, Protocol):
    distance: int  # layers that it looks ahead; 0: it proposes nothing
    reads_predictions: ClassVar[bool]  # whether steps must carry `predicted` for `distance` layers
    reads_learned: ClassVar[bool]  # whether they must carry `learned` for as many

    def propose(self, step: Step, now: Now) -> np.ndarray:
        """Keys to bring, best first. Those on their way or resident are kept from eviction, not loaded again."""


class Residency(Policy, Protocol):
    def capacities(self, num_slots: int, shape: Shape) -> np.ndarray:
        """[L] slots of each layer, in layer scope."""

    def share(self, budget_nbytes: int) -> FastTier | None:
        """How the budget is shared with replicas that stay; None: it is all slots. Raises BadUsage if it is too
        small."""

    cuts: ClassVar[bool]  # whether `share` says how experts are split
    places: ClassVar[bool]  # whether steps are shown to it, and it places experts

    def observe(self, step: Step) -> None:
        """Called at every step, before anything is decided."""

    def place(self, step: Step, num_slots: Sequence[int]) -> Placement | None:
        """Called at every step after `observe`: what is to be resident in its layer from now on; None: as it is.
        `num_slots`: the layer's, on each device."""


class Simple:
    """What most policies are: nothing required, nothing to prepare, no probabilities needed, all at full precision."""

    requires: ClassVar[frozenset[str]] = frozenset()
    fallbacks: ClassVar[Collection[str]] = ()
    sees_probabilities: ClassVar[bool] = False
    sees_embeddings: ClassVar[bool] = False
    reads_learned: ClassVar[bool] = False
    widths: ClassVar[Collection[int]] = ()
    chooses: ClassVar[bool] = True
    every_step: ClassVar[bool] = False
    reads_shadows: ClassVar[bool] = False
    follows_predictions: ClassVar[bool] = False

    @property
    def wants(self) -> frozenset[str]:
        """What it requires, and no more."""
        return self.requires

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        """Nothing to do."""


class SimpleEviction(Simple):
    """An eviction policy that cares for uses alone."""

    ranks: ClassVar[None] = None

    def fetched(self, bits: Mapping[int, int], now: Now) -> None:
        """Nothing to note."""

    def prefetched(self, keys: list[int], now: Now) -> None:
        """Nothing to note."""


class SimpleResidency(Simple):
    """Slots only, the same number in every layer; what does not divide goes to the lower ones."""

    cuts: ClassVar[bool] = False
    places: ClassVar[bool] = False

    def capacities(self, num_slots: int, shape: Shape) -> np.ndarray:
        each, rest = divmod(num_slots, shape.num_layers)
        return np.array([each + (layer < rest) for layer in range(shape.num_layers)], np.int64)

    def share(self, budget_nbytes: int) -> FastTier | None:
        return None

    def observe(self, step: Step) -> None:
        """Nothing to note."""

    def place(self, step: Step, num_slots: Sequence[int]) -> Placement | None:
        return None
