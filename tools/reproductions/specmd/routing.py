"""SpecMD's evictions on recorded routing of a real model; predictions are modelled, as such traces
have none.

Shapes: N rows, E experts.
"""

from dataclasses import replace

import numpy as np

from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import unsized
from artifacts.traces.trace import Trace
from runtime.control.serving import Service
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload
from tools.reproductions.judged import by_seed, number
from tools.reproductions.recorded import Recorded
from tools.reproductions.report import Claim
from tools.reproductions.specmd import figures as paper

RECALL = 0.8  # of the experts that are predicted for the next layer, as the synthetic traces have
TOKENS = 200  # of each third of the requests
_HELD_PERCENT = 20  # 5 % of the bytes at 16 bits, experts of 4 bits
_WINDOW = 8  # experts that the link brings in a layer's time
_GAP = 0.3  # natural logarithms between the least selected expert and the next
_HALVINGS = 25


def of_evictions(recorded: Recorded) -> Claim:
    """Collisions of LRU over Least-Stale's, served one by one."""
    rates = [_rates(part, number) for number, part in enumerate(recorded.parts())]
    low, high = paper.LRU_RATIOS
    return by_seed(
        f"{recorded.name}: lru's collisions over Least-Stale's, 5 %, experts of 4 bits (5.2)",
        f"{low:g} to {high:g}",
        [one["lru"] / one["least_stale"] for one in rates],
        off="evicting at random in its place",
        null=[one["lru"] / one["random"] for one in rates],
        test=lambda times: low / 2 < times <= 2 * high,
        form=number(".2f"),
        over="thirds",
    )


def _rates(recorded: Recorded, seed: int) -> dict[str, float]:
    """Collisions, at least one, by eviction."""
    trace = recorded.trace
    shape = recorded.shape
    within = trace.pass_indices() < TOKENS + trace.pass_indices().min()
    told = with_predictions(trace.take(within), shape.num_experts, np.random.default_rng(seed))
    model = unsized(shape.num_layers, shape.num_experts, shape.top_k)
    workload = Workload(
        told, model, machine("a100-pcie4"), window=_WINDOW * model.shape.expert_nbytes
    )
    held = f"{shape.num_keys * _HELD_PERCENT // 100}x"
    found = {}
    for eviction in ("least_stale", "lru", "random"):
        policies = {"eviction": eviction, "prefetch": "score"}
        setting = Setting(
            eviction, policies=policies, scope="global", budget=held, serving=Service.ONE_BY_ONE
        )
        found[eviction] = max(1, workload.run(setting).counters["collisions"])
    return found


def with_predictions(trace: Trace, num_experts: int, random: np.random.Generator) -> Trace:
    """Return the trace with probabilities [N, E], by the recorded weights and each expert's
    popularity, and predictions [N, 1, E] of the next layer: its logits with as much noise as leaves
    RECALL of its experts among the strongest."""
    rows = np.arange(len(trace))
    uses = np.ones((trace.num_layers, num_experts))
    np.add.at(uses, (trace.layer[:, None], trace.experts), 1)
    popularity = np.log(uses)[trace.layer]
    strongest = popularity.max(axis=1, keepdims=True)
    weakest = np.log(trace.weights.min(axis=1, keepdims=True) + 1e-6)
    logits = popularity - strongest + weakest - _GAP
    np.put_along_axis(
        logits, trace.experts.astype(np.int64), np.log(trace.weights.astype(float) + 1e-6), axis=1
    )
    order = np.lexsort((trace.layer, trace.pass_indices()))
    following = rows.copy()
    following[order[:-1]] = order[1:]
    wanted = trace.experts[following].astype(np.int64)
    noise = random.standard_normal(logits.shape)
    least = 0.0
    most = 64.0
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        found = np.argpartition(-(logits[following] + middle * noise), trace.top_k - 1, axis=1)
        is_found = (found[:, : trace.top_k, None] == wanted[:, None]).any(axis=1)
        if is_found.mean() > RECALL:
            least = middle
        else:
            most = middle
    predicted = _softmax(logits[following] + least * noise)
    return replace(trace, probabilities=_softmax(logits), predicted=predicted[:, None])


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
