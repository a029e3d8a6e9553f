"""The artefacts of a replay: those of the store, and what it lacks counted in the trace."""

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property

import numpy as np

from artifacts.errors import BadInput, Incompatible
from artifacts.modelshapes.known import ModelShape
from artifacts.quantisation.replicas import Replicas, typical
from artifacts.quantisation.widths import MADE_WIDTHS, USUAL_WIDTHS
from artifacts.routing.buddies import buddy_lists, buddy_table
from artifacts.routing.coactivation import Coactivation, conditional
from artifacts.routing.entropy import NUM_PERCENTILES, EntropyHistogram, token_entropy
from artifacts.routing.expert_maps import ExpertMaps
from artifacts.routing.predictors import RECORDED
from artifacts.shape import Shape
from artifacts.splits.slots_by_layer import loads_on_demand
from artifacts.traces.curves import Curves
from artifacts.traces.next_use import NextUse
from artifacts.traces.trace import Trace
from runtime.control.splits.split_solver import curves_of
from runtime.policies import Policies
from runtime.policies.base import Artefacts, Eviction

_COUNTED = {
    "buddies": "buddy lists",
    "coactivated": "buddy lists",
    "entropy": "percentiles of token entropy",
}
# the defaults of `moectl build-buddies`
_ALPHA = 0.95
_LONGEST = 16


def buddies(trace: Trace, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Return buddy lists [L, E, R] padded with -1, and their q [L, E, R], by co-activation. Raises
    BadInput for a trace in which a token selects an expert twice."""
    ordered = np.sort(trace.experts, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise BadInput(
            "the trace selects an expert twice for one token: who is selected with whom cannot be "
            "counted"
        )
    tables = []
    shares = []
    for layer in range(shape.num_layers):
        at = trace.layer == layer
        counts = Coactivation(shape.num_experts)
        counts.update(trace.experts[at], trace.weights[at])
        q = conditional(counts.pairs)
        table = buddy_table(buddy_lists(q, _ALPHA, _LONGEST))
        tables.append(np.pad(table, ((0, 0), (0, _LONGEST - table.shape[1])), constant_values=-1))
        shares.append(
            np.where(tables[-1] >= 0, np.take_along_axis(q, tables[-1].clip(0), axis=1), 0.0)
        )
    return np.stack(tables), np.stack(shares)


def entropy(trace: Trace, shape: Shape) -> np.ndarray:
    """Return percentiles [L, 101] of token activating entropy; zeros for a layer that does not
    occur."""
    rows = np.zeros((shape.num_layers, NUM_PERCENTILES), np.float32)
    for layer in np.unique(trace.layer):
        histogram = EntropyHistogram()
        histogram.update(token_entropy(trace.weights[trace.layer == layer]))
        rows[layer] = histogram.percentiles()
    return rows


def iterations(trace: Trace, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Return embeddings [I, H] and distributions [I, L, E], means over tokens, of the trace's
    iterations in order. Raises BadInput when it lacks embeddings, probabilities or layers."""
    if trace.iteration is None or trace.probabilities is None:
        raise BadInput(
            "the trace holds no embeddings, or no probabilities: record one with `moectl run "
            "--trace FILE`"
        )
    numbers, iteration = np.unique(trace.iteration, return_inverse=True)
    at = iteration * shape.num_layers + trace.layer
    order = np.argsort(at, kind="stable")
    cells, starts, counts = np.unique(at[order], return_index=True, return_counts=True)
    if len(cells) != len(numbers) * shape.num_layers:
        raise BadInput(
            "the trace lacks layers of some pass: its iterations cannot be made into expert maps"
        )
    means = (
        np.add.reduceat(trace.probabilities[order], starts, axis=0, dtype=np.float64)
        / counts[:, None]
    )
    return trace.embeddings[numbers], means.astype(np.float32).reshape(
        len(numbers), shape.num_layers, -1
    )


def maps(trace: Trace, shape: Shape, *, capacity: int, distance: int = 3) -> ExpertMaps:
    """Return expert maps of the trace's iterations, at most `capacity`. Raises BadInput as
    `iterations` does."""
    embeddings, probabilities = iterations(trace, shape)
    sizes = {
        "num_layers": shape.num_layers,
        "num_experts": shape.num_experts,
        "hidden": embeddings.shape[1],
    }
    store = ExpertMaps(capacity, **sizes, distance=distance)
    store.add(embeddings, probabilities)
    return store


def replicas(trace: Trace, model: ModelShape, *, named: Collection[int] = ()) -> Replicas:
    """Return replicas of typical size and loss, at the usual widths and at the widths `named`. Each
    expert's use is counted in the trace, weighted as its routers do."""
    shape = model.shape
    use = np.zeros((shape.num_layers, shape.num_experts))
    shares = trace.weights / trace.weights.sum(axis=1, keepdims=True)
    np.add.at(use, (trace.layer[:, None], trace.experts), shares**2)
    use /= np.maximum(use.sum(axis=1, keepdims=True), 1e-12)
    widths = {*USUAL_WIDTHS, *named} & {*MADE_WIDTHS}
    return typical(
        use, expert_nbytes=shape.expert_nbytes, weight_nbytes=model.weight_nbytes, widths=widths
    )


class TraceArtefacts:
    """Returns artefacts for policies: those `stored`, and what they lack, counted in the trace.
    `assumed` lists every such count in a sentence."""

    def __init__(
        self, trace: Trace, model: ModelShape, stored: Artefacts, assumed: list[str]
    ) -> None:
        self.stored = stored
        self.assumed = assumed
        self._trace = trace
        self._kept = trace.kept()
        self._model = model
        self._curves: dict[tuple[tuple[str, object], ...], Curves] = {}  # by the parameters of lcp
        self._typical: dict[
            frozenset[int], Replicas
        ] = {}  # by the unusual widths that policies name

    def assume(self, note: str) -> None:
        """Add a note to `assumed` unless it is there."""
        if note not in self.assumed:
            self.assumed.append(note)

    def for_policies(self, policies: Policies) -> Artefacts:
        """Return what these policies require and want, except splits, and no more: some of it takes
        long to count."""
        artefacts = self.stored
        needs = policies.requires
        if "next_use" in needs:
            artefacts = replace(artefacts, next_use=self._next_use)
        for name in sorted(needs & _COUNTED.keys()):
            if getattr(self.stored, name) is None:
                artefacts = replace(artefacts, **self._counted[name])
                self.assume(f"{_COUNTED[name]} are counted in the trace that is replayed")
        if "replicas" in needs and artefacts.replicas is None:
            named = frozenset(policies.named_widths - {*USUAL_WIDTHS})
            artefacts = replace(artefacts, replicas=self._typical_replicas(named))
            self.assume(
                "replicas: sizes as in groups of 128, losses as of a small model, use as in the "
                "trace"
            )
        if "predictors" in needs:
            artefacts = replace(artefacts, predictors=RECORDED)
        if "maps" in needs:
            artefacts = self._with_maps(artefacts)
        if "loads" in policies.wants and artefacts.loads is None:
            artefacts = replace(artefacts, loads=self._loads(policies.eviction))
        return artefacts

    def _with_maps(self, artefacts: Artefacts) -> Artefacts:
        """Return the artefacts with expert maps: the store's, else none at first, and the trace's
        iterations join them as they end."""
        hidden = self._trace.embeddings.shape[1]
        if artefacts.maps is None:
            shape = self._model.shape
            empty = ExpertMaps.empty(
                num_layers=shape.num_layers, num_experts=shape.num_experts, hidden=hidden
            )
            self.assume("expert maps: none at first, each iteration joins them once it is over")
            return replace(artefacts, maps=empty, learns_maps=True)
        if artefacts.maps.hidden != hidden:
            raise Incompatible(
                f"the expert maps have embeddings of {artefacts.maps.hidden} numbers, the trace "
                f"of {hidden}: it is another model's"
            )
        if artefacts.maps_run is not None:
            self.assume(f"expert maps: those of run {artefacts.maps_run} of the store")
        return artefacts

    def curves(self, eviction: Eviction) -> Curves:
        """Return the curves of caches that evict by `eviction`. Raises BadInput when the trace
        lacks what they are measured from."""
        key = tuple((eviction.as_lcp or {}).items())
        if key not in self._curves:
            self._curves[key] = curves_of(self._kept, self._model.shape, eviction)
        return self._curves[key]

    def _loads(self, eviction: Eviction) -> np.ndarray | None:
        try:
            curves = self.curves(eviction)
        except BadInput as problem:
            self.assume(f"no curves are measured: {problem}")
            return None
        self.assume(
            "curves, by which layers get their slots, are measured in the trace that is replayed"
        )
        return loads_on_demand(
            curves.hit, curves.prediction, curves.prediction_hit, self._model.shape.top_k
        )

    def _typical_replicas(self, named: frozenset[int]) -> Replicas:
        if named not in self._typical:
            self._typical[named] = replicas(self._kept, self._model, named=named)
        return self._typical[named]

    @cached_property
    def _next_use(self) -> NextUse:
        return NextUse.of(self._trace, self._model.shape)

    @cached_property
    def _counted(self) -> dict[str, dict[str, object]]:
        lists, q = buddies(self._kept, self._model.shape)
        percentiles = entropy(self._kept, self._model.shape)
        return {
            "buddies": {"buddies": lists, "buddy_q": q},
            "coactivated": {"coactivated": (lists, q)},
            "entropy": {"entropy": percentiles},
        }
