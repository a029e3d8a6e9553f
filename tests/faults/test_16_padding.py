"""Padding, or the way in which sequences are shared out, changes what is counted.

`tests/profilers/routing/test_observe.py` counts padded batches as the plain model routes each
sequence alone.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from artifacts.traces.trace import Trace, concatenate
from profilers.routing.observe import RoutingProfile
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint
from tests.profilers.routing.test_observe import (
    BATCHING,
    SEQUENCES,
    assert_equal,
    assert_equal_traces,
    profile_and_trace,
)


@pytest.fixture(scope="module")
def opened(checkpoint: Checkpoint) -> Iterator[MoeModel]:
    model = open_model(str(checkpoint("olmoe")))
    yield model
    model.store.close()


def test_shards_merge_to_the_same_numbers_in_any_order(opened: MoeModel) -> None:
    batching = replace(BATCHING, batch=1)
    whole, whole_trace = profile_and_trace(opened, batching)
    for count in (2, 7):
        shards = [
            profile_and_trace(opened, replace(batching, index=index, count=count))
            for index in range(count)
        ]
        for order in (shards, shards[::-1], shards[1:] + shards[:1]):
            merged = RoutingProfile(opened.shape.num_layers, opened.shape.num_experts)
            for profile, _ in order:
                merged.merge(profile)
            assert_equal(merged, whole)
            trace = concatenate([trace for _, trace in order])
            assert_equal_traces(trace.take(np.argsort(trace.request, kind="stable")), whole_trace)


def routed(opened: MoeModel, batches: list[list[np.ndarray]]) -> tuple[Trace, int]:
    """The routing in prefills of these batches, padded on the left, and the number of counted
    tokens."""
    with Session(opened, Settings(budget="25%", link="2GB/s")) as session:
        recorder = session.record()
        for batch in batches:
            longest = max(map(len, batch))
            ids = torch.zeros(len(batch), longest, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, sequence in enumerate(batch):
                ids[row, longest - len(sequence) :] = torch.from_numpy(sequence)
                mask[row, longest - len(sequence) :] = 1
            session.new_requests(len(batch))
            session.forward(ids, mask=mask)
            session.validate()
        return recorder.trace(), session.controller.now.num_tokens


def test_a_batch_says_of_every_token_what_it_says_alone(opened: MoeModel) -> None:
    """Padding is masked: it appears neither in counters nor in loads nor in traces."""
    alone, num_alone = routed(opened, [[sequence] for sequence in SEQUENCES])
    batch, num_batch = routed(opened, [SEQUENCES[:4], SEQUENCES[4:]])
    assert num_alone == num_batch == sum(map(len, SEQUENCES))
    order = [np.lexsort((trace.token, trace.layer, trace.request)) for trace in (alone, batch)]
    for name in ("request", "layer", "token", "experts"):
        ours, theirs = (
            getattr(trace, name)[rows] for trace, rows in zip((alone, batch), order, strict=True)
        )
        assert np.array_equal(ours, theirs), name
