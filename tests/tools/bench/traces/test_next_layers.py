"""Told nothing it is horizon; told the next pass it keeps what that pass uses."""

from pathlib import Path

import pytest

from moectl.bundled import bundled_trace
from runtime.policies.presets import Scope
from tools.bench.traces.next_layers import Told
from tools.bench.traces.real import TRACES, Prepared


def hits(prepared: Prepared, scope: Scope, **said: object) -> int:
    return prepared.replayed({"eviction": "horizon"}, scope, 0.25, **said).totals()["hits"]


@pytest.mark.parametrize("scope", list(Scope))
def test_what_it_is_told_is_all_that_it_adds(scope: Scope) -> None:
    prepared = Prepared(TRACES[0], bundled_trace(Path("gpt-oss-20b")), 60)
    bound = prepared.replayed({"eviction": "belady"}, scope, 0.25).totals()["hits"]
    plain = hits(prepared, scope)
    assert hits(prepared, scope, eviction=Told()) == plain
    assert plain < hits(prepared, scope, eviction=Told(prepared.shape.num_layers)) <= bound
