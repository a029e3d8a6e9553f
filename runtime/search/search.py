"""The search for the fastest policies of a model, a trace and a machine: lossless, and within a
loss."""

from collections.abc import Callable, Iterable
from math import expm1, inf
from time import perf_counter

import numpy as np

from artifacts.errors import BadInput
from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import Machine
from artifacts.modelshapes.known import ModelShape
from artifacts.routing.similarity import Similarity
from artifacts.traces.clients import Clients, serve
from artifacts.traces.trace import Trace
from runtime.control.build import check_required
from runtime.control.counters import altered, is_exact
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import presets
from runtime.replay.settings import Outcome, Setting, oracles
from runtime.replay.workload import Workload
from runtime.search import space
from runtime.search.halving import Trials, climb, halve, one_by_one, rungs
from runtime.search.predicted_loss import Damage
from runtime.search.results import (
    LEAST_PASSES,
    LossScale,
    ReplayAll,
    SearchPlan,
    SearchResult,
    SearchTime,
    Tried,
)
from runtime.search.space import Combination

_PUBLISHED = 5  # presets of a space that are tried on the whole trace in any case
_SLACK = 1.5  # times the allowed loss: predictions are rough, and what is measured decides


class Search:
    """Replays combinations at one budget. `scale` turns squared errors into losses; `similarity`
    prices stand-ins. With `clients` the requests of the trace are served together."""

    def __init__(
        self,
        trace: Trace,
        model: ModelShape,
        machine: Machine,
        *,
        artefacts: Artefacts,
        budget: str,
        costs: Costs | None = None,
        window: int | None = None,
        similarity: Similarity | None = None,
        clients: Clients | None = None,
    ) -> None:
        trace = serve(trace, clients).trace if clients else trace
        self.machine = machine
        self.budget = budget
        self.scale = LossScale()
        self._trace = trace
        self._model = model
        self._known = {"artefacts": artefacts, "costs": costs, "window": window}
        self._similarity = similarity
        self._passes = trace.pass_indices()
        self._serves_many = clients is not None
        self._workloads: dict[int, Workload] = {}
        self._assumed: set[str] = set()  # by replays elsewhere
        self.num_replays = 0
        self._progress: Callable[[], None] | None = None

    def apart(self) -> "Search":
        """Return a search like this one, to replay the same combinations elsewhere."""
        other = Search(
            self._trace,
            self._model,
            self.machine,
            budget=self.budget,
            similarity=self._similarity,
            **self._known,
        )
        other.scale = self.scale
        return other

    @property
    def num_passes(self) -> int:
        """Number of passes of the trace."""
        return int(self._passes.max()) + 1

    @property
    def ratio(self) -> float:
        """The link's bandwidth over the near tier's."""
        return self.machine.link_gbps / self.machine.near_gbps

    @property
    def _near_tokens(self) -> float:
        """Tokens that the near tier computes while it reads an expert, where there are many."""
        costs = self._known["costs"] or Costs.of(self._model, self.machine)
        near = costs.near if costs.near.memory_s else costs.near_host
        return near.memory_s / near.token_s if self._serves_many and near.token_s else inf

    @property
    def _widths(self) -> list[int]:
        """Bits of the stored replicas."""
        replicas = self._known["artefacts"].replicas
        return replicas.widths if replicas else []

    @property
    def assumed(self) -> list[str]:
        """Assumptions of the replays. Of notes that differ only in their findings, given in
        brackets, only the first is listed."""
        ours = (note for workload in self._workloads.values() for note in workload.assumed)
        first = {
            note.partition(" (")[0]: note for note in reversed([*ours, *sorted(self._assumed)])
        }
        return [*first.values()][::-1]

    def replay(self, combination: Combination, passes: int) -> Tried:
        """Replay the first `passes` of the trace with a combination. Raises a Problem if it cannot
        be replayed, or if its loss is unknown."""
        # a live run must have them too
        check_required(build(combination.policies), self._known["artefacts"])
        damage = Damage(
            self._known["artefacts"].replicas, self._similarity, self._model.shape.num_layers
        )
        setting = Setting(
            "tried", policies=combination.policies, scope=combination.scope, budget=self.budget
        )
        outcome = self._workload(passes).run(setting, damage)
        self.count()
        return self._tried(combination, outcome, damage.per_token)

    def count(self, assumed: Iterable[str] = ()) -> None:
        """Count one replay; `assumed` lists the assumptions of a replay made elsewhere."""
        self._assumed.update(assumed)
        self.num_replays += 1
        if self._progress:
            self._progress()

    def oracle(self, passes: int) -> float:
        """Return milliseconds a token of Belady with perfect prefetching, in the faster scope."""
        bounds = [
            oracles(Setting("bound", scope=scope, budget=self.budget))[1]
            for scope in ("layer", "global")
        ]
        return min(_ms(self._workload(passes).run(bound)) for bound in bounds)

    def full(self, passes: int) -> float:
        """Return the same with every expert resident once the trace has brought it."""
        return _ms(self._workload(passes).run(Setting("full", "full")))

    def seconds_a_pass(self) -> float:
        """Return a replay's seconds per pass, the mean of a cheap and of a costly combination."""
        amount = rungs(self.num_passes, least=LEAST_PASSES)[0]
        seconds = []
        for combination in (
            Combination(),
            Combination(prefetch="frequency", eviction="lcp", miss="near"),
        ):
            self.replay(combination, amount)  # compiles and counts what later replays reuse
            begin_s = perf_counter()
            self.replay(combination, amount)
            seconds.append((perf_counter() - begin_s) / amount)
        return sum(seconds) / len(seconds)

    def run(
        self,
        plan: SearchPlan,
        progress: Callable[[int, int], None] = lambda done, total: None,
        *,
        spaces: tuple[list[Combination], list[Combination]] | None = None,
        replay_all: ReplayAll | None = None,
        time: SearchTime | None = None,
    ) -> SearchResult:
        """Search the lossless space and the lossy one, or `spaces` if given. The result is the same
        for the same plan, whether `replay_all` replays or this search, one combination after
        another, unless its `time` is limited."""
        before = self.num_replays
        self._progress = lambda: progress(self.num_replays - before, plan.num_replays)
        tokens = self._near_tokens
        exact, lossy = spaces or (
            space.lossless(self.ratio, tokens),
            space.lossy(self.ratio, self._widths, tokens),
        )
        replay_all = replay_all or one_by_one(self.replay)
        published = _published()
        limits = (
            [{"is_late": late, "at_once": time.at_once} for late in time.is_late]
            if time
            else [{}, {}]
        )
        ranks = (lambda tried: (tried.ms,)), (lambda tried: self._lossy_rank(tried, plan.max_loss))
        by_time, by_loss = (
            Trials(replay_all, rank, **limit) for rank, limit in zip(ranks, limits, strict=True)
        )
        in_exact = set(exact)
        published_exact = [
            combination for combination in published.values() if combination in in_exact
        ]
        published_lossy = [
            combination for combination in published.values() if combination not in in_exact
        ]
        finalists = [
            *self._finalists(by_time, exact, published_exact, plan),
            *self._finalists(by_loss, lossy, published_lossy, plan),
        ]
        amount = plan.rungs[-1]
        in_full = {
            key: tried
            for trials in (by_time, by_loss)
            for key, tried in trials.tried_on(amount).items()
        }
        best = [in_full[combination] for combination in dict.fromkeys(finalists)]
        refused = [*by_time.refused.values(), *by_loss.refused.values()]
        return SearchResult(
            lossless=sorted(
                (tried for tried in best if _keeps_output(tried)), key=lambda tried: tried.ms
            ),
            lossy=list(
                {tried.combination: tried for tried in best if not tried.is_lossless}.values()
            ),
            published={
                name: in_full[combination]
                for name, combination in published.items()
                if combination in in_full
            },
            num_tried=len(
                {combination for trials in (by_time, by_loss) for combination, _ in trials.results}
            ),
            num_space=len(exact) + len(lossy),
            num_replays=self.num_replays - before,
            refused={why: refused.count(why) for why in dict.fromkeys(refused)},
            num_untried=by_time.num_untried + by_loss.num_untried,
        )

    def _finalists(
        self,
        trials: Trials[Combination, Tried],
        candidates: list[Combination],
        published: list[Combination],
        plan: SearchPlan,
    ) -> list[Combination]:
        """Return the finalists of one space, the neighbours of its best that were tried, and the
        best published presets."""
        amounts = plan.rungs
        chosen = list(
            dict.fromkeys([*published, *space.drawn(candidates, plan.candidates, seed=plan.seed)])
        )
        finalists = halve(trials, chosen, amounts, keep=4)
        if finalists and plan.climbing:
            climb(
                trials,
                finalists[0],
                lambda start: self._around(start, candidates, plan),
                amounts,
                most=plan.climbing,
            )
        promising = trials.best(published, amounts[max(0, len(amounts) - 2)])[:_PUBLISHED]
        return trials.best([*trials.tried_on(amounts[-1]), *promising], amounts[-1])

    def _around(
        self, combination: Combination, candidates: list[Combination], plan: SearchPlan
    ) -> list[Combination]:
        """Return the neighbours in a random order: there may be more than the search tries."""
        neighbours = space.neighbours(combination, candidates)
        return [
            neighbours[index]
            for index in np.random.default_rng(plan.seed).permutation(len(neighbours)).tolist()
        ]

    def _lossy_rank(self, tried: Tried, max_loss: float) -> tuple:
        """Rank combinations within the loss limit, with slack, by time, and the others after them
        by loss."""
        is_near = tried.loss is not None and tried.loss <= _SLACK * max_loss
        return (0, tried.ms) if is_near else (1, np.inf if tried.loss is None else tried.loss)

    def _tried(
        self, combination: Combination, outcome: Outcome, damage: tuple[float, float]
    ) -> Tried:
        counters = outcome.counters
        num_altered = altered(outcome.counters)
        return Tried(
            combination if outcome.num_slots else combination.without_slots,
            ms=_ms(outcome),
            loss=0.0 if is_exact(num_altered) else self.loss_of(damage),
            exposed_ms=outcome.times["exposed_ms"],
            near_ms=outcome.times["near_ms"],
            fast_nbytes=outcome.fast_nbytes,
            hit_rate=counters["hits"] / max(1, counters["requests"]),
            damage=damage,
            altered=num_altered,
        )

    def loss_of(self, damage: tuple[float, float]) -> float | None:
        """Return the predicted relative rise of perplexity; None if one of its parts was not
        measured."""
        nats = 0.0
        for part, slope in zip(damage, (self.scale.few_bits, self.scale.replaced), strict=True):
            if part and slope is None:
                return None
            nats += part * (slope or 0.0)
        return expm1(nats)

    def _workload(self, passes: int) -> Workload:
        if passes not in self._workloads:
            part = (
                self._trace
                if passes >= self.num_passes
                else self._trace.take(np.flatnonzero(self._passes < passes))
            )
            self._workloads[passes] = Workload(part, self._model, self.machine, **self._known)
        return self._workloads[passes]


def _keeps_output(tried: Tried) -> bool:
    """Return whether the policies never alter the output, and did not in this replay. Others that
    altered nothing in this replay are neither lossless nor lossy, for they may in the next."""
    return tried.combination.is_lossless and tried.is_lossless


def _ms(outcome: Outcome) -> float:
    if outcome.times["tpot_ms"] is None:
        raise BadInput(
            "the trace decodes nothing: tuning is for decoding; record one with `moectl run "
            "--trace FILE`"
        )
    return outcome.times["tpot_ms"]


def _published() -> dict[str, Combination]:
    """Return the presets that can run at any budget, by name."""
    runnable = [
        preset for preset in presets().values() if not preset.waits_for and preset.budget is None
    ]
    return {preset.name: Combination(**preset.texts(), scope=preset.scope) for preset in runnable}
