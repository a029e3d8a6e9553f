"""Recorded routing for tools.gpu.bench: of its own texts, for perfect prefetching, and of others,
for tuning."""

from dataclasses import replace
from operator import attrgetter

import numpy as np

from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import HERE, Machine
from artifacts.modelshapes.known import guessed
from artifacts.traces.next_use import NextUse
from artifacts.traces.trace import Trace
from runtime import devices
from runtime.control.sizes import budget_nbytes
from runtime.kernels.load import has_numba
from runtime.model.open import MoeModel
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import preset
from runtime.replay.candidates import RoadCosts
from runtime.search import space
from runtime.search.results import SearchPlan, Tried
from runtime.search.search import Search
from runtime.search.space import Combination
from runtime.session.link_choice import resolve_link
from runtime.session.run_costs import measured_costs, roads_of
from runtime.session.session import Session, Settings
from runtime.session.settings import FUSED, HOST
from tools.gpu.packages import experts_by
from tools.gpu.rows import Rates, Text

ORACLE = {"eviction": "belady", "prefetch": "oracle"}
CANDIDATES = 32
CLIMBING = 16
_COMPILED = {"horizon", "blend", "activation", "frequency"}  # policies that need numba
_SEEN_AHEAD = "next_gate:distance=2"  # the largest distance of any candidate


def recorded(opened: MoeModel, text: Text, *, link: str, prefetch: str = "none") -> Trace:
    """The routing of every sequence, from a lossless run with moectl's kernels."""
    from profilers.compare.quality import read

    settings = Settings(
        policies={"prefetch": prefetch},
        budget="100%",
        link=link,
        experts=experts_by(opened.model.device),
    )
    with Session(opened, settings) as session:
        recorder = session.record()
        read(session, text.sequences, prefill=text.prompt)
        return recorder.trace()


def known_future(opened: MoeModel, text: Text, *, link: str) -> Artefacts:
    """The future routing of these texts in this order, for Belady and perfect prefetching."""
    return Artefacts(next_use=NextUse.of(recorded(opened, text, link=link), opened.shape))


def tuned(opened: MoeModel, text: Text, rates: Rates, *, budget: str, link: str) -> Tried:
    """The fastest lossless policies that fetch misses and need no artefacts, by replays of these
    texts; measure them on other texts."""
    search = Forecast(opened, text, rates, link=link).search(budget)
    if not has_numba():  # the search also replays the published presets, some of which need it
        drawn = space.drawn(_candidates(), CANDIDATES, seed=0)
        return min((search.replay(one, search.num_passes) for one in drawn), key=attrgetter("ms"))
    plan = SearchPlan(CANDIDATES, search.num_passes, CLIMBING, seed=0, max_loss=0.0)
    found = search.run(plan, spaces=(_candidates(), [])).lossless  # presets too, some without loads
    return next(one for one in found if one.combination.miss == "fetch")


class Forecast:
    """Replays of these texts with times measured here, as `moectl tune` and `moectl plan` make
    them."""

    def __init__(self, opened: MoeModel, text: Text, rates: Rates, *, link: str) -> None:
        self._trace = recorded(opened, text, link=link, prefetch=_SEEN_AHEAD)
        self._opened = opened
        self._link = resolve_link(opened, link=link, near=None, scaled_to=None)
        self._load_s = opened.shape.expert_nbytes / rates.link
        self._roads: dict[bool, RoadCosts] = {}  # by whether kernels compute the experts
        gbps = rates.link / 1e9
        # the window is that of the costs: of the machine only the link is asked
        self._machine = Machine(HERE, gbps, float("inf"), gbps, 0.0, gbps, "measured")
        # only its shape counts
        self._model = replace(guessed(opened.shape), name="measured", assumed=())

    def search(self, budget: str, costs: Costs | None = None) -> Search:
        is_fused = experts_by(self._opened.model.device) == FUSED
        own = {"artefacts": Artefacts(), "budget": budget}
        costs = costs or self._measured(is_fused=is_fused).host
        return Search(self._trace, self._model, self._machine, **own, costs=costs)

    def predicted_ms(self, settings: Settings) -> float | None:
        """Milliseconds of a decoded token; None for policies that need artefacts."""
        policies = build(settings.texts())
        if policies.requires:
            return None
        scope = settings.scope or preset(settings.preset).scope
        budget = preset(settings.preset).budget or settings.budget
        roads = self._measured(is_fused=settings.experts == FUSED)
        shape = self._opened.shape
        asks_host = settings.decide == HOST and budget_nbytes(budget, shape) < shape.nbytes
        search = self.search(budget, roads.host if asks_host else roads.device)
        return search.replay(
            Combination(**settings.texts(), scope=str(scope)), search.num_passes
        ).ms

    def _measured(self, *, is_fused: bool) -> RoadCosts:
        """Return costs measured as the run computes, with loads at the link's rate."""
        if is_fused not in self._roads:
            costs = measured_costs(self._opened, self._link, is_fused=is_fused)
            costs = replace(costs, load_s=self._load_s, host_s=0.0)
            has_graphs = is_fused and devices.has_graphs(self._opened.model.device)
            self._roads[is_fused] = roads_of(costs, has_graphs=has_graphs)
        return self._roads[is_fused]


def _candidates() -> list[Combination]:
    plain = [
        one for one in space.lossless(1.0) if (one.miss, one.residency) == ("fetch", "uniform")
    ]
    left_out = set() if has_numba() else _COMPILED
    return [one for one in plain if left_out.isdisjoint(one) and not build(one.policies).requires]


def other_texts(text: Text, vocabulary: int) -> Text:
    """Other texts of the same number, length and kind."""
    from tools.gpu.models import texts

    count = len(text.sequences)
    length = len(text.sequences[0])
    found: list[np.ndarray] = texts(vocabulary, count=count, length=length, seed=1)
    return Text(found, text.prompt)
