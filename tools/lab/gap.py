"""How much of Belady's lead the past can tell: moe-cache-eval's rules and predictor beside horizon.

    python -m tools.lab.gap
    python -m tools.lab.gap --traces FOLDER --only gpt-oss-20b-mmlu --write docs/lab/atlas.md

*Their rules* (Zhang, Reproducible Evaluation of MoE Expert Caching, arXiv 2608.07911, and the code
of shijiuzhang/moe-cache-eval, read and written anew: a reading) replay event-atomically: a layer of
a pass is one event; its experts hit if they are resident when it begins; then of the residents and
of what it used the policy keeps as many as the layer holds, so that it may decline to keep what was
just loaded. 40 % of each layer; requests decode in continuous batches of B.

Their predictor is least squares of the log of the wait until the next use, on 8 features of an
access (recency, whether it is the first, uses so far, the gap before, gate mass, tokens that use
it, layer, popularity), fitted on the first half of the requests. The expected step of the next use
stays until the next access. `asked anew` is the same regression, on the same 8 quantities as they
are now, for every expert of the layer whenever the layer runs, as horizon does. All policies are
counted on the second half, from a cold cache. Intervals resample the requests, or the passes.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from artifacts.shape import Shape
from artifacts.traces.next_use import NEVER, NextUse
from artifacts.traces.trace import Trace
from runtime.policies import build
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step
from runtime.policies.presets import Scope, preset
from tools.bench.performance import Table
from tools.bench.traces.real import (
    Cell,
    Prepared,
    RealTrace,
    half,
    options,
    present,
    tabulate,
    units_of,
)
from tools.reproductions.intervals import resampled

THEIR_SHARE = 0.4
BATCHES = (1, 2, 8)
CAUSAL = ("lru", "lfu", "lfru")  # their baselines that see the past; least_stale is lru by layer
OTHERS = ("class_lru", "predictor", "asked anew", "horizon")
ORACLES = ("belady, forced", "belady")


class Lfru(SimpleEviction):
    """Their best baseline: the lowest uses / age goes first, in events since the last use."""

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._uses = np.zeros(shape.num_keys)
        self._last = np.zeros(shape.num_keys)

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        self._uses[keys] += 1
        self._last[keys] = now.step

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        return (self._uses[keys] / (now.step - self._last[keys] + 1),)


class Predicted(SimpleEviction):
    """Evicts by a predicted step of the next use, from a regression on features of an access; or
    `anew`, of every expert of the layer that runs. Without `weights` it collects what a fit takes.
    """

    def __init__(self, *, anew: bool, weights: np.ndarray | None = None) -> None:
        self._anew = anew
        self._weights = weights
        self.seen: list[tuple[np.ndarray, np.ndarray]] = []  # features, keys of each step

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape
        self._clock = 0
        self._last = np.full(shape.num_keys, -1)
        self._uses = np.zeros(shape.num_keys)
        self._gap = np.zeros(shape.num_keys)
        self.expected = np.full(shape.num_keys, float(NEVER))

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        shape = self._shape
        own = np.array(keys)
        first = step.layer * shape.num_experts
        mass, tokens = (
            np.bincount(step.selected.ravel(), weights, shape.num_experts)
            for weights in (step.weights.ravel(), None)
        )
        places = self._clock + np.arange(len(own))
        is_first = self._last[own] < 0
        recency = np.where(is_first, 0, places - self._last[own])
        before = np.where(self._gap[own] > 0, self._gap[own], recency)
        self._gap[own] = recency
        self._uses[own] += 1
        self._last[own] = places
        self._clock += len(own)
        if self._anew:
            own = first + np.arange(shape.num_experts)
            is_first = self._last[own] < 0
            recency = np.where(is_first, 0, self._clock - self._last[own])
            before = self._gap[own]
            places = np.full(len(own), self._clock)
        uses = np.log1p(self._uses[own])
        features = np.stack(
            [
                np.log1p(recency),
                is_first,
                uses,
                np.log1p(before),
                mass[own - first],
                np.log1p(tokens[own - first]),
                np.full(len(own), step.layer / shape.num_layers),
                1e3 * uses / np.log1p(places + 1),
                np.ones(len(own)),
            ],
            axis=1,
        ).astype(np.float32)
        if self._weights is None:
            self.seen.append((features, own))
        else:
            wait = np.expm1(np.clip(features @ self._weights, 0, 25))
            self.expected[own] = now.step + np.maximum(wait, 1)

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        return (-self.expected[keys],)


def fitted(trace: Trace, shape: Shape, *, anew: bool) -> Predicted:
    """Fit the predictor on a trace."""
    watcher = Predicted(anew=anew)
    watcher.prepare(shape, Artefacts())
    following = NextUse.of(trace, shape)
    upcoming = following.first.copy()
    targets = []
    now = Now()
    for step, keys in steps_of(trace, shape):
        now.step += 1
        watcher.used(keys, step, now)
        upcoming[following.step_keys[now.step]] = following.following[now.step]
        wait = upcoming[watcher.seen[-1][1]] - now.step
        targets.append(np.minimum(wait, len(following.step_keys)))
    features = np.concatenate([features for features, _ in watcher.seen])
    logs = np.log1p(np.concatenate(targets).astype(np.float64))
    return Predicted(anew=anew, weights=np.linalg.lstsq(features, logs, rcond=None)[0])


def steps_of(trace: Trace, shape: Shape) -> Iterator[tuple[Step, list[int]]]:
    """Yield every step of a trace and its keys, in order of first appearance."""
    for one in trace.steps():
        selected = one.experts.astype(np.int64)
        step = Step(one.pass_index, int(one.phase), one.layer, selected, one.weights)
        distinct = dict.fromkeys(selected.ravel().tolist())
        yield step, [one.layer * shape.num_experts + expert for expert in distinct]


def event_atomic(
    trace: Trace,
    shape: Shape,
    policy: SimpleEviction,
    *,
    share: float = THEIR_SHARE,
    is_forced: bool = False,
) -> tuple[Cell, float]:
    """Replay by their rules; return hits and expert assignments by pass, with the share of
    residents whose expected use is over, if the policy expects any. If it `is_forced`, what was
    loaded is kept."""
    policy.prepare(shape, Artefacts(next_use=NextUse.of(trace, shape)))
    num_slots, more = divmod(round(share * shape.num_keys), shape.num_layers)
    resident = np.zeros(shape.num_keys, bool)
    num_passes = int(trace.pass_indices().max()) + 1
    misses = np.zeros(num_passes)
    assignments = np.zeros(num_passes)
    now = Now()
    overdue = []
    for step, keys in steps_of(trace, shape):
        now.step += 1
        now.pass_index = step.pass_index
        now.layer = step.layer
        now.num_tokens += len(step.selected) if step.layer == 0 else 0
        missing = [key for key in keys if not resident[key]]
        misses[step.pass_index] += len(missing)
        assignments[step.pass_index] += step.selected.size
        policy.used(keys, step, now)
        layer = slice(step.layer * shape.num_experts, (step.layer + 1) * shape.num_experts)
        if isinstance(policy, Predicted) and resident[layer].any():
            overdue.append((policy.expected[layer][resident[layer]] < now.step).mean())
        resident[keys] = True
        held = np.flatnonzero(resident[layer]) + layer.start
        surplus = len(held) - num_slots - (step.layer < more)
        if surplus > 0:
            if is_forced:
                optional = np.setdiff1d(held, missing)
                held = optional if len(optional) >= surplus else held
            order = np.lexsort((held, *reversed(policy.order(held, now))))
            resident[held[order[:surplus]]] = False
    late = float(np.mean(overdue)) if overdue else 0.0
    return Cell(assignments - misses, assignments), late


def together(trace: Trace, batch: int) -> Trace:
    """Return the trace with `batch` requests under way at a time, each beginning when one ends."""
    _, request = np.unique(trace.request, return_inverse=True)
    passes = trace.pass_indices()
    lengths = np.array([len(np.unique(passes[request == one])) for one in range(request.max() + 1)])
    free = np.zeros(batch, np.int64)
    begins = np.zeros(len(lengths), np.int64)
    for one, length in enumerate(lengths):
        slot = free.argmin()
        begins[one] = free[slot]
        free[slot] += length
    own = np.array([passes[request == one].min() for one in range(len(lengths))])
    merged = begins[request] + passes - own[request]
    order = np.lexsort((trace.layer, merged))
    return replace(trace, pass_=merged.astype(np.int32)).take(order)


def halves(trace: Trace) -> tuple[Trace, Trace]:
    """Return the first and the second half of the requests."""
    requests = np.unique(trace.request)
    is_first = np.isin(trace.request, requests[: len(requests) // 2])
    return trace.take(np.flatnonzero(is_first)), trace.take(np.flatnonzero(~is_first))


def policies(learnt: Trace, shape: Shape) -> Mapping[str, SimpleEviction]:
    """Every policy by its name in the tables, the predictors fitted."""
    named = {
        name: build(preset("on-demand").texts() | {"eviction": name}).eviction
        for name in ("lru", "lfu", "class_lru", "horizon", "belady")
    }
    return named | {
        "lfru": Lfru(),
        "predictor": fitted(learnt, shape, anew=False),
        "asked anew": fitted(learnt, shape, anew=True),
    }


def by_their_rules(prepared: Prepared, real: RealTrace, batches: Sequence[int]) -> Table:
    """The table of a trace in batches: misses of expert assignments, and what they tell."""
    shape = prepared.shape
    names = (*CAUSAL, *OTHERS, *ORACLES)
    told = (
        "best of theirs to `belady`",
        "future-victim share",
        *(f"recovered: `{one}`" for one in OTHERS),
    )
    rows = {name: [] for name in (*(f"`{name}`" for name in names), *told, "overdue residents")}
    for batch in batches:
        parts = [together(part, batch) if batch > 1 else part for part in halves(prepared.trace)]
        found, late = replayed(*parts, shape)
        units, _ = units_of(parts[1])
        weights = resampled(int(units.max()) + 1)
        missed = {name: 1 - cell.rates(units, weights) for name, cell in found.items()}
        for name in names:
            values = missed[name]
            rows[f"`{name}`"].append(f"{values[0]:.3f} ± {half(values[1:]):.3f}")
        best = missed[min(CAUSAL, key=lambda name: missed[name][0])]
        gap = best - missed["belady"]
        rows[told[0]].append(interval(gap / best))
        rows[told[1]].append(interval((best - missed["belady, forced"]) / gap))
        for name in OTHERS:
            rows[f"recovered: `{name}`"].append(interval((best - missed[name]) / gap))
        rows["overdue residents"].append(f"{late:.0%}")
    columns = ("misses", *(f"B = {batch}" for batch in batches))
    note = f"{shape.num_layers} layers, {THEIR_SHARE:.0%} of each; the second half of the requests"
    return Table(f"{real.told}: by their rules", columns, [(n, *c) for n, c in rows.items()], note)


def replayed(learnt: Trace, counted: Trace, shape: Shape) -> tuple[dict[str, Cell], float]:
    """Replay every policy by their rules; return its cell, and the share of the predictor's
    residents that are overdue."""
    found = {}
    late = 0.0
    for name, policy in policies(learnt, shape).items():
        found[name], overdue = event_atomic(counted, shape, policy)
        late = overdue if name == "predictor" else late
    belady = build(preset("on-demand").texts() | {"eviction": "belady"}).eviction
    found["belady, forced"], _ = event_atomic(counted, shape, belady, is_forced=True)
    return found, late


def by_our_rules(prepared: Prepared, counted: Prepared, real: RealTrace) -> Table:
    """The table of a trace as in docs/lab/traces.md: hit rates, and the share of the gap from the best
    of theirs, or of `class_lru` too, that each policy closes."""
    learnt, _ = halves(prepared.trace)
    columns = []
    names = (*CAUSAL, *OTHERS, "belady")
    rows = {f"`{name}`": [] for name in names} | {f"closed: `{name}`": [] for name in OTHERS[1:]}
    for scope, size in ((Scope.LAYER, 0.25), (Scope.LAYER, 0.5), (Scope.GLOBAL, 0.25)):
        if not counted.has_choice(scope, size):
            continue
        columns.append(f"{scope} {size:.0%}")
        rates = {}
        for name, policy in policies(learnt, prepared.shape).items():
            counters = counted.replayed({}, scope, size, eviction=policy)
            rates[name] = Cell.of(counters).rates(
                counted.units, resampled(int(counted.units.max()) + 1)
            )
        for name in names:
            rows[f"`{name}`"].append(f"{rates[name][0]:.3f} ± {half(rates[name][1:]):.3f}")
        best = rates[max((*CAUSAL, "class_lru"), key=lambda name: rates[name][0])]
        for name in OTHERS[1:]:
            closed = (rates[name] - best) / (rates["belady"] - best)
            rows[f"closed: `{name}`"].append(interval(closed))
    told = [(name, *cells) for name, cells in rows.items()]
    note = "loading on demand, the second half of the requests"
    return Table(f"{real.told}: by ours", ("hit rates", *columns), told, note)


def interval(values: np.ndarray) -> str:
    """A share and its interval: the figure stands first, its resamplings behind it."""
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return f"{values[0]:.0%} ({low:.0%} to {high:.0%})"


def compared(real: RealTrace, path: Path, chosen: argparse.Namespace) -> list[Table]:
    """Both tables of a trace; requests that it decoded together stay together."""
    prepared = Prepared.of_file(real, path, chosen.tokens)
    counted = Prepared(halves(prepared.trace)[1], real.num_experts)
    most = len(np.unique(counted.trace.request)) if prepared.unit == "request" else 1
    batches = [batch for batch in chosen.batches if batch <= most]
    return [by_their_rules(prepared, real, batches), by_our_rules(prepared, counted, real)]


def main() -> None:
    chosen = options(__doc__, batches=(list(BATCHES), "requests that decode together")).parse_args()
    command = f"python -m tools.lab.gap --traces FOLDER --tokens {chosen.tokens}"
    tabulate(chosen, present(chosen), lambda *one: compared(*one, chosen), command, "-gap")


if __name__ == "__main__":
    main()
