"""What policies may want to know of a model, counted in a trace where no store has it."""

import numpy as np

from artifacts.buddies import buddy_lists, buddy_table
from artifacts.coactivation import Coactivation, conditional
from artifacts.entropy import NUM_PERCENTILES, EntropyHistogram, token_entropy
from artifacts.errors import BadInput
from artifacts.modelshapes import ModelShape
from artifacts.replicas import Replicas, typical
from artifacts.shape import Shape
from artifacts.trace import Trace

_ALPHA, _LONGEST = 0.95, 16  # the defaults of `moectl build-buddies`


def buddies(trace: Trace, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Buddy lists [L, E, R] padded with -1, and their q [L, E, R], by co-activation. Raises BadInput for a trace in
    which a token selects an expert twice."""
    ordered = np.sort(trace.experts, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise BadInput("the trace selects an expert twice for one token: who is selected with whom cannot be counted")
    tables, shares = [], []
    for layer in range(shape.num_layers):
        at = trace.layer == layer
        counts = Coactivation(shape.num_experts)
        counts.update(trace.experts[at], trace.weights[at])
        q = conditional(counts.pairs)
        table = buddy_table(buddy_lists(q, _ALPHA, _LONGEST))
        tables.append(np.pad(table, ((0, 0), (0, _LONGEST - table.shape[1])), constant_values=-1))
        shares.append(np.where(tables[-1] >= 0, np.take_along_axis(q, tables[-1].clip(0), axis=1), 0.0))
    return np.stack(tables), np.stack(shares)


def entropy(trace: Trace, shape: Shape) -> np.ndarray:
    """Percentiles [L, 101] of token activating entropy; zeros for a layer that does not occur."""
    rows = np.zeros((shape.num_layers, NUM_PERCENTILES), np.float32)
    for layer in np.unique(trace.layer):
        histogram = EntropyHistogram()
        histogram.update(token_entropy(trace.weights[trace.layer == layer]))
        rows[layer] = histogram.percentiles()
    return rows


def replicas(trace: Trace, model: ModelShape) -> Replicas:
    """Replicas of typical size and loss; what is lost by them counts the trace's own uses, weighted as its routers
    do."""
    shape = model.shape
    use = np.zeros((shape.num_layers, shape.num_experts))
    shares = trace.weights / trace.weights.sum(axis=1, keepdims=True)
    np.add.at(use, (trace.layer[:, None], trace.experts), shares**2)
    use /= np.maximum(use.sum(axis=1, keepdims=True), 1e-12)
    return typical(use, expert_nbytes=shape.expert_nbytes, weight_nbytes=model.weight_nbytes)
