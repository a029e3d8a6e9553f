"""Calls of layers become passes and requests by one law, whatever their sizes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from artifacts.importers.calls import number_calls
from artifacts.traces.trace import DECODE

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=12)


def columns(sizes: list[int], num_layers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Layer, call and place of each row, pass by pass."""
    rows = [
        (layer, call, place)
        for call, size in enumerate(sizes)
        for layer in range(num_layers)
        for place in range(size)
    ]
    return tuple(np.array(column) for column in zip(*rows, strict=True))


@given(SIZES, st.integers(1, 3))
def test_positions_count_on_within_a_request_and_prompts_after_decoding_begin_one(
    sizes: list[int], num_layers: int
) -> None:
    layer, call, place = columns(sizes, num_layers)
    numbered = number_calls(layer, call, place, None, str)
    assert numbered.kept.all() and np.array_equal(numbered.pass_, call)
    first = layer == 0
    request = numbered.request[first]
    token = numbered.token[first]
    assert set(np.diff(request)) <= {0, 1} and request[0] == 0
    for number in np.unique(request):
        assert token[request == number].tolist() == list(range((request == number).sum()))
    begins = sum(size > 1 and before == 1 for before, size in zip(sizes, sizes[1:], strict=False))
    assert request[-1] == begins
    assert ((numbered.phase == DECODE) == (np.array(sizes)[call] == 1)).all()


@given(SIZES, st.integers(1, 4), st.integers(1, 3))
def test_a_batch_keeps_its_calls_and_no_others(
    sizes: list[int], batch: int, num_layers: int
) -> None:
    sizes = [*sizes, batch]
    layer, call, place = columns(sizes, num_layers)
    numbered = number_calls(layer, call, place, batch, str)
    assert np.array_equal(numbered.kept, np.array(sizes)[call] == batch)
    kept = numbered.kept & (layer == 0)
    assert np.array_equal(numbered.request[kept], place[kept])
    assert numbered.token[kept].tolist() == np.repeat(np.arange(sizes.count(batch)), batch).tolist()
