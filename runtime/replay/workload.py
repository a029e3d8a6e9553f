"""Policies tried on one trace and one machine: setting after setting, on virtual time."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from artifacts.errors import BadInput, Incompatible
from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import Machine
from artifacts.modelshapes.known import ModelShape
from artifacts.quantisation.replicas import Replicas
from artifacts.routing.expert_maps import ExpertMaps
from artifacts.routing.predictors import RECORDED
from artifacts.splits.slots_by_layer import loads_on_demand
from artifacts.splits.solve import EVEN, Latencies, SolvedSplit
from artifacts.traces.curves import Curves
from artifacts.traces.next_use import NextUse
from artifacts.traces.trace import Trace
from runtime.control import sizes
from runtime.control import split_solver as solving
from runtime.control.build import build_controller, fast_tier, lay_out
from runtime.control.plan import Plan
from runtime.control.resplit import NOT_ANEW, Reconfiguration, tokens_between
from runtime.policies import POLICIES, Policies, describe
from runtime.policies.base import Artefacts, FastTier, Step
from runtime.policies.presets import Scope, preset
from runtime.replay import from_trace as derived
from runtime.replay.replay import replay
from runtime.replay.settings import Outcome, Setting
from runtime.replay.virtual_time import Timing

_ENOUGH, _LEAST = 3_000, 150  # steps, and at least passes, to tell which of some splits is the fastest
_DERIVED = {"buddies": "buddy lists", "entropy": "percentiles of token entropy"}


class Workload:
    """A trace of a model on a machine. `artefacts` are a store's; what they lack is counted in the trace itself, and
    `assumed` says so. `window` overrides what the machine's link moves during a layer, in bytes; `costs` what the
    machine's data sheet promises, where they were measured."""

    def __init__(
        self,
        trace: Trace,
        model: ModelShape,
        machine: Machine,
        *,
        artefacts: Artefacts | None = None,
        window: int | None = None,
        costs: Costs | None = None,
    ) -> None:
        _check(trace, model)
        self.trace, self.model, self.machine = trace, model, machine
        self.assumed: list[str] = [*trace.assumed, *model.assumed, *_unused_layers(trace)]
        self._artefacts = artefacts or Artefacts()
        self._costs = costs or Costs.of(model, machine)
        self._window = window
        self._splits: dict[tuple, SolvedSplit] = {}  # by budget and policies

    def run(self, setting: Setting, watch: Callable[[Step, Plan], None] | None = None) -> Outcome:
        """Replay the trace from an empty cache; `watch` is told of every step. Raises BadUsage, BadInput or
        Incompatible."""
        policies, shape = setting.build(), self.model.shape
        scope = Scope(setting.scope or preset(setting.preset).scope)
        self._check_columns(policies)
        budget = preset(setting.preset).budget or setting.budget
        artefacts = self._artefacts_for(policies, setting)
        fast = fast_tier(
            policies,
            shape,
            budget,
            scope=scope,
            artefacts=artefacts,
            machine=self.machine.name,
            num_devices=setting.devices,
        )
        for note in policies.fallbacks:
            self._assume(note)
        window = self._window_for(policies)
        controller = build_controller(
            policies,
            shape,
            num_slots=fast.num_slots,
            shadows=fast.shadows,
            split=fast.split,
            scope=scope,
            window=window,
            artefacts=artefacts,
            num_devices=setting.devices,
        )
        timing = Timing(self._costs_of(policies), shape.num_experts, controller.nbytes)
        if setting.devices > 1 and tokens_between(None, fast.split, policies):
            self._assume(NOT_ANEW)
        reconfiguration = None
        if every := tokens_between(setting.reconfigure_every, fast.split, policies, num_devices=setting.devices):
            reconfiguration = Reconfiguration(
                policies,
                shape,
                fast.split,
                every=every,
                lay_out=lambda other: lay_out(controller, policies, other, scope),
            )
        replay(self.trace, controller, timing, reconfiguration=reconfiguration, watch=watch)
        return Outcome(
            setting=setting,
            policies={axis: describe(getattr(policies, axis)) for axis in POLICIES},
            scope=scope,
            num_slots=fast.slots_nbytes(shape) // shape.expert_nbytes,
            fast_nbytes=fast.slots_nbytes(shape) + _shadows_nbytes(fast, controller.nbytes),
            window=window,
            counters=controller.counters.totals(),
            by_layer=controller.counters.by_layer(),
            times=timing.summary(),
            split=solving.receipt(fast.split, shape) | (reconfiguration.receipt() if reconfiguration else {}),
            by_device=controller.by_device(),
        )

    def _costs_of(self, policies: Policies) -> Costs:
        """With what these policies take themselves in every layer."""
        texts, deciding = [f"{axis} {describe(getattr(policies, axis))}" for axis in POLICIES], self._costs.deciding
        own_s = sum(deciding.get(text, deciding.get(text.partition(":")[0], 0.0)) for text in texts)
        return replace(self._costs, rest=replace(self._costs.rest, memory_s=self._costs.rest.memory_s + own_s))

    def _window_for(self, policies: Policies) -> int:
        if not policies.brings_ahead:
            return 0
        if self._window is not None:
            return self._window
        return self._costs.window_nbytes(self.model.shape.expert_nbytes, self.model.shape.top_k)

    def _artefacts_for(self, policies: Policies, setting: Setting) -> Artefacts:
        """What these policies want, and no more of what takes time to count."""
        found, needs = self._artefacts, policies.requires
        if "next_use" in needs:
            found = replace(found, next_use=self._next_use)
        for name in sorted(needs & _DERIVED.keys()):
            if getattr(self._artefacts, name) is None:
                found = replace(found, **self._derived[name])
                self._assume(f"{_DERIVED[name]} are counted in the trace that is replayed")
        if "replicas" in needs and found.replicas is None:
            found = replace(found, replicas=self._typical_replicas)
            self._assume("replicas: sizes as in groups of 128, losses as of a small model, use as in the trace")
        if "predictors" in needs:
            found = replace(found, predictors=RECORDED)
        if "maps" in needs:
            found = self._with_maps(found)
        if "loads" in policies.wants and found.loads is None:
            found = replace(found, loads=self._loads)
        if "splits" in policies.wants:
            found = replace(found, splits=self._splits_for(setting, is_required="splits" in needs))
        return found

    def _with_maps(self, found: Artefacts) -> Artefacts:
        """The store's; without any the trace's own iterations, each once it is over."""
        hidden = self.trace.embeddings.shape[1]
        if found.maps is None:
            shape = self.model.shape
            empty = ExpertMaps.empty(num_layers=shape.num_layers, num_experts=shape.num_experts, hidden=hidden)
            self._assume("expert maps: none at first, each iteration joins them once it is over")
            return replace(found, maps=empty, learns_maps=True)
        if found.maps.hidden != hidden:
            raise Incompatible(
                f"the expert maps have embeddings of {found.maps.hidden} numbers, the trace of {hidden}: it is another "
                "model's"
            )
        if found.maps_run is not None:
            self._assume(f"expert maps: those of run {found.maps_run} of the store")
        return found

    def _splits_for(self, setting: Setting, *, is_required: bool) -> tuple[SolvedSplit, ...]:
        """The store's for this machine; if none is for this budget, one solved on the trace itself. Raises BadInput
        where one is required and the trace cannot tell."""
        known = tuple(split for split in self._artefacts.splits or () if split.machine == self.machine.name)
        nbytes = sizes.budget_nbytes(setting.budget, self.model.shape)
        if any(split.budget_nbytes == nbytes for split in known):
            return known
        try:
            solved = self.solved(setting)
        except BadInput as problem:
            if is_required:
                raise
            self._assume(f"no split is solved: {problem}")
            return known
        self._assume(
            f"the split of {setting.budget} is solved on the trace that is replayed ({solved.source}): what it gains "
            "there, other text may not"
        )
        return (solved, *known)

    def solved(self, setting: Setting, *, zeta: float = 0.01) -> SolvedSplit:
        """Of all candidates, those of the solvers by steps of `zeta`, the split of the setting's budget with which its
        policies replay the trace, or the beginning of it, fastest. Raises BadInput where the trace cannot tell."""
        nbytes = sizes.budget_nbytes(setting.budget, self.model.shape)
        known = (nbytes, zeta, setting.preset, *sorted(setting.policies.items()), setting.scope, setting.devices)
        if known not in self._splits:
            self._splits[known] = self._fastest(setting, nbytes, zeta)
        return self._splits[known]

    def _fastest(self, setting: Setting, nbytes: int, zeta: float) -> SolvedSplit:
        shape = self.model.shape
        unsolved = SolvedSplit(nbytes, self.machine.name, np.empty(0), np.empty(0), self.latencies, zeta=zeta)
        passing = setting.build().residency.passing
        texts = setting.texts() | {"residency": f"split:theta=None,passing={passing}"}
        tried = replace(setting, policies=texts, reconfigure_every=0)
        found = []
        for split in solving.candidates(self.curves, shape, unsolved):
            known = {
                "artefacts": replace(self._artefacts, splits=(split,)),
                "window": self._window,
                "costs": self._costs,
            }
            times = Workload(self._beginning, self.model, self.machine, **known).run(tried).times
            found.append((times["tpot_ms"] or times["ttft_ms"], split))
        found.sort(key=lambda pair: pair[0])
        best = found[0][1]
        how = f"{best.solver}, theta {best.theta.min():.2g} to {best.theta.max():.2g}"
        times = ", ".join(f"{_candidate(split)} {ms:.4g}" for ms, split in found)
        return replace(best, source=f"{how}, the fastest of {len(found)} by replay, ms a token: {times}")

    @cached_property
    def _beginning(self) -> Trace:
        """As many passes as it takes to tell splits apart."""
        passes = self.trace.pass_indices()
        return self.trace.take(np.flatnonzero(passes < max(_LEAST, _ENOUGH // self.model.shape.num_layers)))

    @property
    def latencies(self) -> Latencies:
        return solving.latencies_of(self._costs, self.model.shape.top_k)

    @cached_property
    def _loads(self) -> np.ndarray | None:
        try:
            curves = self.curves
        except BadInput as problem:
            self._assume(f"no curves are measured: {problem}")
            return None
        self._assume("curves, by which layers get their slots, are measured in the trace that is replayed")
        return loads_on_demand(curves.hit, curves.prediction, curves.prediction_hit, self.model.shape.top_k)

    @cached_property
    def curves(self) -> Curves:
        return solving.curves_of(self.trace, self.model.shape)

    def _assume(self, note: str) -> None:
        if note not in self.assumed:
            self.assumed.append(note)

    @cached_property
    def _typical_replicas(self) -> Replicas:
        return derived.replicas(self.trace, self.model)

    @cached_property
    def _next_use(self) -> NextUse:
        return NextUse.of(self.trace, self.model.shape)

    @cached_property
    def _derived(self) -> dict[str, dict[str, object]]:
        lists, q = derived.buddies(self.trace, self.model.shape)
        percentiles = derived.entropy(self.trace, self.model.shape)
        return {"buddies": {"buddies": lists, "buddy_q": q}, "entropy": {"entropy": percentiles}}

    def _check_columns(self, policies: Policies) -> None:
        """Raise BadInput when a policy wants to see what the trace does not show."""
        prefetch, trace = policies.prefetch, self.trace
        text, deep = describe(prefetch), min(prefetch.distance, self.model.shape.num_layers)
        for is_read, held, source, reach in (
            (prefetch.reads_predictions, trace.predicted, "predictions", prefetch.distance),
            (prefetch.reads_learned, trace.learned, "what fitted predictors say", deep),
        ):
            if is_read and (held is None or held.shape[1] < reach):
                raise BadInput(
                    f"prefetch {text} needs {source} {reach} layers ahead, which the trace does not hold: "
                    f"record one with `moectl run --prefetch {text} --trace FILE`, or use --prefetch none"
                )
        for axis in POLICIES:
            if getattr(policies, axis).sees_embeddings and trace.iteration is None:
                raise BadInput(
                    f"{axis} {describe(getattr(policies, axis))} needs what each pass was given, which the trace does "
                    "not hold: record one with `moectl run --trace FILE`"
                )
            if getattr(policies, axis).sees_probabilities and trace.probabilities is None:
                raise BadInput(
                    f"{axis} {describe(getattr(policies, axis))} needs the routers' probabilities, which the trace "
                    "does not hold: record one with `moectl run --trace FILE`"
                )


def _candidate(split: SolvedSplit) -> str:
    return split.solver if split.solver != EVEN else f"all {split.theta[0]:g}"


def _shadows_nbytes(fast: FastTier, nbytes: Mapping[int, int]) -> int:
    return 0 if fast.shadows is None else sum(nbytes[bits] for bits in fast.shadows.tolist())


def _check(trace: Trace, model: ModelShape) -> None:
    """Raise BadInput when the trace cannot be one of this model."""
    shape = model.shape
    highest = int(trace.experts.max())
    if highest >= shape.num_experts:
        raise BadInput(
            f"the trace selects expert {highest}, but a layer has only {shape.num_experts} experts "
            f"(0 to {shape.num_experts - 1})"
        )
    if (trace.num_layers, trace.top_k) != (shape.num_layers, shape.top_k):
        raise BadInput(
            f"the trace has {trace.num_layers} layers and {trace.top_k} experts per token, {model.name} "
            f"{shape.num_layers} and {shape.top_k}: it is another model's"
        )


def _unused_layers(trace: Trace) -> list[str]:
    unused = sorted(set(range(trace.num_layers)) - set(np.unique(trace.layer).tolist()))
    if not unused:
        return []
    named = ", ".join(map(str, unused))
    return [f"layers {named} never occur in the trace and have their share of the budget all the same"]
