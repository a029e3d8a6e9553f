"""Small steps worked through by hand."""

import numpy as np

from artifacts.quantisation.replicas import Replicas
from artifacts.quantisation.widths import WIDTHS
from artifacts.shape import Shape
from artifacts.traces.next_use import NextUse
from artifacts.traces.trace import DECODE
from runtime.policies import parse
from runtime.policies.base import Artefacts, Residents, Step

SHAPE = Shape(num_layers=3, num_experts=6, top_k=2, expert_nbytes=160)


def prepared(
    axis: str, text: str, *, replicas: tuple[int, ...] = (16, 4, 2), next_use: NextUse | None = None
):
    """Return the policy that `text` names, ready for its first step."""
    policy = parse(axis, text)
    nbytes = {bits: SHAPE.expert_nbytes * bits // 16 for bits in replicas}
    loss = np.tile(8.0 / np.maximum(WIDTHS, 0.5), (SHAPE.num_layers, SHAPE.num_experts, 1))
    policy.prepare(
        SHAPE, Artefacts(replicas=Replicas(nbytes, loss, loss, loss[..., 0]), next_use=next_use)
    )
    return policy


def step(
    selected: list[list[int]],
    probabilities: list[list[float]] | None = None,
    *,
    layer: int = 0,
    phase: int = DECODE,
    pass_index: int = 0,
    predicted: list[list[list[float]]] | None = None,
    weights: list[list[float]] | None = None,
    last: list[int] | None = None,
) -> Step:
    """Return a step. Weights are its probabilities, not renormalised, unless given; without both,
    all ranks weigh the same."""
    ids = np.array(selected, np.int64)
    p = None if probabilities is None else np.array(probabilities, np.float32)
    if weights is None:
        w = (
            np.full(ids.shape, 1 / ids.shape[1], np.float32)
            if p is None
            else np.take_along_axis(p, ids, axis=1)
        )
    else:
        w = np.array(weights, np.float32)
    ahead = None if predicted is None else np.array(predicted, np.float32)
    return Step(
        pass_index, phase, layer, ids, w, p, ahead, None if last is None else np.array(last)
    )


def residents(*experts: int, num_free: int = 0, loading: tuple[int, ...] = ()) -> Residents:
    """Return states of six experts: some resident, some loading, the rest absent."""
    resident = np.zeros(6, bool)
    absent = np.ones(6, bool)
    resident[list(experts)] = True
    absent[[*experts, *loading]] = False
    return Residents(resident, absent, (num_free,))
