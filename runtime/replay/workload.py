"""Replays a trace on one machine, setting after setting, on virtual time."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np

from artifacts.errors import BadInput
from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import Machine
from artifacts.modelshapes.known import ModelShape
from artifacts.quantisation.replicas import resident_nbytes
from artifacts.splits.solve import EVEN, Latencies, SolvedSplit
from artifacts.traces.clients import Clients, Served, serve
from artifacts.traces.curves import Curves
from artifacts.traces.trace import Trace
from runtime.control import sizes
from runtime.control.build import build_controller, fast_tier, lay_out
from runtime.control.controller import Controller
from runtime.control.plan import Plan
from runtime.control.splits import split_solver
from runtime.control.splits.resplit import NOT_ANEW, Reconfiguration, tokens_between
from runtime.policies import POLICIES, Policies, describe
from runtime.policies.base import Artefacts, Eviction, FastTier, Step
from runtime.policies.prefetch.draft import UNTOLD
from runtime.policies.presets import Scope, preset
from runtime.replay.checks import check_columns, check_model, unused_layers
from runtime.replay.from_trace import TraceArtefacts
from runtime.replay.replay import replay
from runtime.replay.settings import Outcome, Setting
from runtime.replay.virtual_time import ReplayTiming

# steps, and the least number of passes, to compare splits on
_ENOUGH = 3_000
_LEAST = 150


class Workload:
    """A trace of a model on a machine. `artefacts` come from a store; what they lack is counted in
    the trace, and `assumed` lists that.

    `window` overrides the bytes that the machine's link moves during a layer. `costs` are measured
    costs, in place of those of the machine's data sheet, which are of weights besides experts at
    `dense` bits if that is given. With `clients` their requests are those of the trace, served
    together, and `trace` is what was computed.
    """

    def __init__(
        self,
        trace: Trace,
        model: ModelShape,
        machine: Machine,
        *,
        artefacts: Artefacts | None = None,
        window: int | None = None,
        costs: Costs | None = None,
        dense: int | None = None,
        clients: Clients | None = None,
    ) -> None:
        check_model(trace, model)
        self.served = serve(trace, clients) if clients else None
        self.trace = self.served.trace if self.served else trace
        self.model = model
        self.machine = machine
        self.assumed: list[str] = [
            *trace.assumed,
            *model.assumed,
            *unused_layers(trace),
            *_repeated(self.served),
        ]
        self._artefacts = TraceArtefacts(self.trace, model, artefacts or Artefacts(), self.assumed)
        self._costs = costs or Costs.of(model, machine).with_dense(dense)
        self._window = window
        self._splits: dict[tuple, SolvedSplit] = {}  # by budget and policies

    def of_trace(self, trace: Trace) -> "Workload":
        """Return the workload of another trace, of the same model on the same machine."""
        return Workload(
            trace,
            self.model,
            self.machine,
            artefacts=self._artefacts.stored,
            window=self._window,
            costs=self._costs,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, of prompts and of answers."""
        return len(self.trace) // self.trace.num_layers

    def run(self, setting: Setting, watch: Callable[[Step, Plan], None] | None = None) -> Outcome:
        """Replay the trace from an empty cache and call `watch` with every step. Raises BadUsage,
        BadInput or Incompatible."""
        policies = setting.build().with_ratio(lambda: self._costs.link_over_near)
        shape = self.model.shape
        scope = Scope(setting.scope or preset(setting.preset).scope)
        check_columns(self.trace, policies)
        window = self._window_for(policies)
        fast, controller = self._build(policies, setting, scope, window)
        timing = ReplayTiming(self._costs_of(policies), shape.num_experts, controller.nbytes)
        reconfiguration = self._reconfiguration(policies, setting, scope, fast, controller)
        replay(self.trace, controller, timing, reconfiguration=reconfiguration, watch=watch)
        shadows = [] if fast.shadows is None else fast.shadows.tolist()
        return Outcome(
            setting=setting,
            policies={axis: describe(getattr(policies, axis)) for axis in POLICIES},
            scope=scope,
            num_slots=fast.slots_nbytes(shape) // shape.expert_nbytes,
            fast_nbytes=fast.slots_nbytes(shape) + resident_nbytes(controller.nbytes, shadows),
            window=window,
            counters=controller.counters.totals(),
            by_layer=controller.counters.by_layer(),
            decoding=controller.counters.of_passes([one.decodes for one in timing.passes]),
            times=timing.summary() | (self.served.summary(timing.ends_s()) if self.served else {}),
            hits_by_pass=controller.counters.hits_by_pass(),
            passes=timing.passes,
            split=split_solver.receipt(fast.split, shape)
            | (reconfiguration.receipt() if reconfiguration else {}),
            by_device=controller.by_device(),
        )

    def _build(
        self, policies: Policies, setting: Setting, scope: Scope, window: int
    ) -> tuple[FastTier, Controller]:
        """Build the setting's empty fast tier and its controller."""
        budget = preset(setting.preset).budget or setting.budget
        common = {
            "scope": scope,
            "artefacts": self._artefacts_for(policies, setting),
            "num_devices": setting.devices,
        }
        fast = fast_tier(policies, self.model.shape, budget, machine=self.machine.name, **common)
        is_told = self.trace.foretold is not None or not policies.prefetch.reads_foretold
        for note in (*policies.fallbacks, *[UNTOLD] * (not is_told)):
            self._artefacts.assume(note)
        controller = build_controller(
            policies,
            self.model.shape,
            num_slots=fast.num_slots,
            shadows=fast.shadows,
            split=fast.split,
            window=window,
            serving=setting.serving,
            **common,
        )
        return fast, controller

    def _reconfiguration(
        self,
        policies: Policies,
        setting: Setting,
        scope: Scope,
        fast: FastTier,
        controller: Controller,
    ) -> Reconfiguration | None:
        """Return what solves the split anew during the replay, if the setting or its policies ask
        for that."""
        if setting.devices > 1 and tokens_between(None, fast.split, policies):
            self._artefacts.assume(NOT_ANEW)
        every = tokens_between(
            setting.reconfigure_every, fast.split, policies, num_devices=setting.devices
        )
        if not every:
            return None
        return Reconfiguration(
            policies,
            self.model.shape,
            fast.split,
            every=every,
            lay_out=lambda other: lay_out(controller, policies, other, scope),
        )

    def _costs_of(self, policies: Policies) -> Costs:
        """Return the costs, with the time that these policies take to decide in every layer."""
        texts = [f"{axis} {describe(getattr(policies, axis))}" for axis in POLICIES]
        deciding = self._costs.deciding
        own_s = sum(deciding.get(text, deciding.get(text.partition(":")[0], 0.0)) for text in texts)
        return replace(
            self._costs, rest=replace(self._costs.rest, memory_s=self._costs.rest.memory_s + own_s)
        )

    def _window_for(self, policies: Policies) -> int:
        if not policies.brings_ahead:
            return 0
        if self._window is not None:
            return self._window
        return self._costs.window_nbytes(self.model.shape.expert_nbytes, self.model.shape.top_k)

    def _artefacts_for(self, policies: Policies, setting: Setting) -> Artefacts:
        """Return what these policies require and want, and no more: some of it takes long to
        count."""
        artefacts = self._artefacts.for_policies(policies)
        if "splits" in policies.wants:
            splits = self._splits_for(setting, is_required="splits" in policies.requires)
            artefacts = replace(artefacts, splits=splits)
        return artefacts

    def _splits_for(self, setting: Setting, *, is_required: bool) -> tuple[SolvedSplit, ...]:
        """Return the store's splits for this machine; if none is for this budget, add one that is
        solved on the trace itself. Raises BadInput when a split is required and the trace does not
        have what that takes."""
        stored = tuple(
            split
            for split in self._artefacts.stored.splits or ()
            if split.machine == self.machine.name
        )
        nbytes = sizes.budget_nbytes(setting.budget, self.model.shape)
        if any(split.budget_nbytes == nbytes for split in stored):
            return stored
        try:
            solved = self.solved(setting)
        except BadInput as problem:
            if is_required:
                raise
            self._artefacts.assume(f"no split is solved: {problem}")
            return stored
        self._artefacts.assume(
            f"the split of {setting.budget} is solved on the trace that is replayed "
            f"({solved.source}): what it gains there, other text may not"
        )
        return (solved, *stored)

    def solved(self, setting: Setting, *, zeta: float = 0.01) -> SolvedSplit:
        """Return the split of the setting's budget with which its policies replay the trace, or its
        beginning, fastest. Candidates are those of the solvers, greedy's with steps of `zeta`, and
        even splits. Raises BadInput when the trace does not have what that takes."""
        nbytes = sizes.budget_nbytes(setting.budget, self.model.shape)
        key = (
            nbytes,
            zeta,
            setting.preset,
            *sorted(setting.policies.items()),
            setting.scope,
            setting.devices,
        )
        if key not in self._splits:
            self._splits[key] = self._fastest(setting, nbytes, zeta)
        return self._splits[key]

    def _fastest(self, setting: Setting, nbytes: int, zeta: float) -> SolvedSplit:
        shape = self.model.shape
        unsolved = SolvedSplit(
            nbytes, self.machine.name, np.empty(0), np.empty(0), self.latencies, zeta=zeta
        )
        policies = setting.build()
        passing = policies.residency.passing
        texts = setting.texts() | {"residency": f"split:theta=None,passing={passing}"}
        tried = replace(setting, policies=texts, reconfigure_every=0)
        timed = []
        for split in split_solver.candidates(self.curves(policies.eviction), shape, unsolved):
            options = {
                "artefacts": replace(self._artefacts.stored, splits=(split,)),
                "window": self._window,
                "costs": self._costs,
            }
            times = Workload(self._beginning, self.model, self.machine, **options).run(tried).times
            timed.append((times["tpot_ms"] or times["ttft_ms"], split))
        timed.sort(key=lambda pair: pair[0])
        best = timed[0][1]
        how = f"{best.solver}, theta {best.theta.min():.2g} to {best.theta.max():.2g}"
        times = ", ".join(f"{_candidate(split)} {ms / timed[0][0]:.4g}" for ms, split in timed)
        return replace(
            best, source=f"{how}, the fastest of {len(timed)} by replay, time over its: {times}"
        )

    @cached_property
    def _beginning(self) -> Trace:
        """Return the first passes of the trace, enough to compare splits on."""
        passes = self.trace.pass_indices()
        return self.trace.take(
            np.flatnonzero(passes < max(_LEAST, _ENOUGH // self.model.shape.num_layers))
        )

    def curves(self, eviction: Eviction) -> Curves:
        """Return the trace's hit and prediction curves. Raises BadInput when the trace lacks what
        they are measured from."""
        return self._artefacts.curves(eviction)

    @property
    def latencies(self) -> Latencies:
        return split_solver.latencies_of(self._costs, self.model.shape.top_k)


def _repeated(served: Served | None) -> list[str]:
    if served is None or not served.num_repeated:
        return []
    return [
        f"{served.num_repeated} of {len(served.arrived)} requests are repeated, as the trace has "
        "too few: requests that repeat each other want fewer distinct experts together than "
        "others would"
    ]


def _candidate(split: SolvedSplit) -> str:
    return split.solver if split.solver != EVEN else f"all {split.theta[0]:g}"
