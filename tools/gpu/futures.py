"""Recorded routing for tools.gpu.bench: of its own texts, for perfect prefetching, and of others,
for tuning."""

from dataclasses import replace
from operator import attrgetter

import numpy as np

from artifacts.hardware.costs import Costs, Work
from artifacts.hardware.machines import HERE, Machine
from artifacts.modelshapes.known import guessed
from artifacts.traces.next_use import NextUse
from artifacts.traces.trace import Trace
from runtime.kernels.load import has_numba
from runtime.model.open import MoeModel
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import preset
from runtime.search import space
from runtime.search.results import SearchPlan, Tried
from runtime.search.search import Search
from runtime.search.space import Combination
from runtime.session.probe import expert_seconds, rest_seconds
from runtime.session.session import Session, Settings
from runtime.session.settings import FUSED
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
    return search.run(plan, spaces=(_candidates(), [])).lossless[0]


class Forecast:
    """Replays of these texts with times measured here, as `moectl tune` and `moectl plan` make
    them."""

    def __init__(self, opened: MoeModel, text: Text, rates: Rates, *, link: str) -> None:
        self._trace = recorded(opened, text, link=link, prefetch=_SEEN_AHEAD)
        shape = opened.shape
        nbytes = opened.shape.expert_nbytes
        expert_s = expert_seconds(opened, is_fused=experts_by(opened.model.device) == FUSED)
        self._costs = Costs(
            expert=Work(expert_s),
            load_s=nbytes / rates.link,
            load_latency_s=0.0,
            near=Work(float("inf")),
            rest=Work(rest_seconds(opened) / shape.num_layers),
            head=Work(0.0),
        )
        fast = nbytes / expert_s / 1e9
        gbps = rates.link / 1e9
        self._machine = Machine(HERE, fast, float("inf"), gbps, 0.0, gbps, "measured")
        self._model = replace(guessed(shape), name="measured", assumed=())  # only its shape counts

    def search(self, budget: str) -> Search:
        own = {"artefacts": Artefacts(), "budget": budget, "costs": self._costs}
        return Search(self._trace, self._model, self._machine, **own)

    def predicted_ms(self, settings: Settings) -> float | None:
        """Milliseconds of a decoded token; None for policies that need artefacts."""
        policies = build(settings.texts())
        if policies.requires:
            return None
        scope = settings.scope or preset(settings.preset).scope
        search = self.search(preset(settings.preset).budget or settings.budget)
        return search.replay(
            Combination(**settings.texts(), scope=str(scope)), search.num_passes
        ).ms


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
