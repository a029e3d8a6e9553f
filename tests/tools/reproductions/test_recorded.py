"""Recorded routing: the bundled trace of gpt-oss-20b."""

from pathlib import Path

import numpy as np
import pytest

from artifacts.errors import BadInput
from tools.reproductions.command import reproduce
from tools.reproductions.recorded import (
    Recorded,
    evenness,
    peers_for,
    rank_correlation,
)
from tools.reproductions.specmd.routing import RECALL, with_predictions


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return Recorded.read(tokens=600)


def test_it_is_read_a_token_a_pass(recorded: Recorded) -> None:
    shape = recorded.shape
    assert (shape.num_layers, shape.num_experts, shape.top_k) == (24, 32, 4)
    assert len(recorded.trace) == 24 * (recorded.trace.pass_indices().max() + 1) <= 24 * 600
    assert recorded.uses.sum() == recorded.trace.experts.size
    assert sum(len(part.trace) for part in recorded.parts()) == len(recorded.trace)
    assert Recorded.read(Path("gpt-oss-20b"), tokens=600).name == recorded.name


def test_hits_are_those_of_belady_at_most_and_of_a_set_its_share(recorded: Recorded) -> None:
    rates = {policy: recorded.hits(policy, 8)[0][0] for policy in ("lru", "belady")}
    assert rates["belady"] > rates["lru"] > recorded.static_sets(8)[0]
    assert recorded.static_sets(8)[0] == pytest.approx(8 / 32, abs=0.02)
    whole, layers = recorded.hits("lru", 32)
    assert len(layers) == 24 and whole[0] > 0.9


def test_a_request_is_more_like_itself(recorded: Recorded) -> None:
    own, other = recorded.likeness(32)
    assert 0.5 < other[0] < own[0] < 1


def test_mixing_leaves_how_often_an_expert_is_selected(recorded: Recorded) -> None:
    few = recorded.by_layer(peers_for).mean()
    mixed = recorded.by_layer(peers_for, mixed=True).mean()
    assert few < mixed < 31
    assert peers_for(np.ones((4, 4)) / 3 - np.eye(4) / 3) == 3
    assert evenness(np.ones((4, 4)) / 3 - np.eye(4) / 3) == pytest.approx(1)
    assert rank_correlation(np.array([3.0, 2.0, 1.0])) == pytest.approx(-1)


def test_modelled_predictions_have_the_recall_that_is_said(recorded: Recorded) -> None:
    trace = recorded.trace.take(np.arange(len(recorded.trace)) < 24 * 100)
    told = with_predictions(trace, 32, np.random.default_rng(0))
    strongest = np.argsort(-told.probabilities, axis=1)[:, :4]
    assert (np.sort(strongest, axis=1) == np.sort(trace.experts, axis=1)).all()
    foretold = np.argsort(-told.predicted[:-1, 0], axis=1)[:, :4]
    found = (foretold[:, :, None] == trace.experts[1:, None]).any(axis=1)
    assert found.mean() == pytest.approx(RECALL, abs=0.02)


@pytest.mark.parametrize("name", ["moepic-table1", "moepic"])
def test_a_trace_of_another_model_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match="gpt-oss-20b has 32 experts a layer: give a trace of "):
        reproduce(name, trace=Path("gpt-oss-20b"), other_options=False)
