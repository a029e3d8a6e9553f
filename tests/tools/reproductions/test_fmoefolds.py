"""Parts of a trace: each request is replayed once, with maps of others, and its passes are added
up."""

import numpy as np
import pytest

from artifacts.errors import BadInput
from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import unsized
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import Trace
from runtime.control.counters import hit_rate
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload
from tests import TRACE
from tools.reproductions.fmoe.figures import MACHINE
from tools.reproductions.fmoe.folds import ByRequest, FoldConditions, Folds

MODEL = unsized(8, 32, 4)


@pytest.fixture(scope="module")
def recorded() -> Trace:
    trace = read_parquet(TRACE, num_experts=32)
    return trace.take(trace.token < 34)


def test_every_request_is_replayed_once_with_maps_of_the_others(recorded: Trace) -> None:
    folds = Folds(recorded, MODEL, "a trace")
    iterations = len(np.unique(recorded.iteration))
    assert folds.num_requests == len(np.unique(recorded.request)) == folds.weights.shape[1]
    assert sum(iterations - held for held in folds.num_maps) == iterations
    found = folds.run("fmoe", conditions=FoldConditions())
    assert found.sums.shape == (6, folds.num_requests)
    passes = np.unique(np.stack((recorded.request, recorded.pass_indices())), axis=1)[0]
    assert (found.sums[3] + found.sums[5] == np.unique(passes, return_counts=True)[1]).all()


def test_sums_by_request_are_those_of_the_whole_replay(recorded: Trace) -> None:
    """Two requests are two parts, each a replay of its own."""
    two = recorded.take(recorded.request < 2)
    conditions = FoldConditions(budget="40%", costs_of="mixtral-8x7b")
    folds = Folds(two, MODEL, "a trace")
    found = folds.run("mixtral-offloading", conditions=conditions)
    for request in (0, 1):
        alone = two.take(two.request == request)
        workload = Workload(alone, MODEL, machine(MACHINE), **folds._pace(conditions))
        outcome = workload.run(Setting("alone", "mixtral-offloading", scope="global", budget="40%"))
        own = ByRequest(found.sums[:, [request]])
        once = np.ones((1, 1))
        assert own.hit_rate(once) == pytest.approx(hit_rate(outcome.counters))
        assert own.ttft_s(once) == pytest.approx(outcome.times["ttft_ms"] / 1e3)
        assert own.tpot_s(once) == pytest.approx(outcome.times["tpot_ms"] / 1e3)
    each = [found.sums[[2, 4]].sum(axis=0)]
    assert found.latency_s(np.array([[1, 1], [2, 0]])) == pytest.approx([np.mean(each), each[0][0]])


def test_one_request_is_too_few(recorded: Trace) -> None:
    with pytest.raises(BadInput, match="a trace has one request"):
        Folds(recorded.take(recorded.request == 0), MODEL, "a trace")
