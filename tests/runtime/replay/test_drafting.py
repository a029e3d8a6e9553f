"""The drafting oracle: passes of drafts by hand, a table that an independent replay gave, and bad
input."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from artifacts.errors import BadInput, BadUsage
from artifacts.hardware.costs import Costs, Work
from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import ModelShape
from artifacts.shape import Shape
from artifacts.traces.synthetic import Dials, generate
from artifacts.traces.trace import DECODE, PREFILL
from moectl.shared.trace_source import TraceSource, open_source
from runtime.replay.drafting import Drafts, best_draft, verified
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload

SHAPE = Shape(num_layers=2, num_experts=8, top_k=2, expert_nbytes=1000)
MODEL = ModelShape("small", SHAPE, hidden=64, vocabulary=100)
TRACE = generate(Dials(tokens=60, requests=3, prompt=4), SHAPE)
FREE = Work(0.0)
LOADS_ALONE = Costs(FREE, load_s=1.0, load_latency_s=0.0, near=FREE, rest=FREE, head=FREE)
READS_ALONE = Costs(FREE, load_s=0.0, load_latency_s=0.0, near=FREE, rest=Work(1.0), head=Work(1.0))


def workload(costs: Costs) -> Workload:
    return Workload(TRACE, MODEL, machine("a100-pcie4"), costs=costs)


def decoded_widths(length: int, chance: float) -> list[int]:
    passes = verified(TRACE, length, Drafts((chance,)))
    at_first = passes.take(np.flatnonzero((passes.layer == 0) & (passes.phase == DECODE)))
    return np.unique(at_first.pass_, return_counts=True)[1].tolist()


def test_passes_by_hand() -> None:
    """Of each request's 16 decoded tokens, three drafts that are all right make four passes; drafts
    that are all wrong make a pass of each token, as wide as the request still goes."""
    assert decoded_widths(3, 1.0) == [4, 4, 4, 4] * 3
    assert decoded_widths(3, 0.0) == ([4] * 13 + [3, 2, 1]) * 3
    prompts = verified(TRACE, 3, Drafts((0.5,))).phase == PREFILL
    assert prompts.sum() == (TRACE.phase == PREFILL).sum()


def test_what_is_wrong_is_rejected_and_left_out_when_the_drafts_are_others() -> None:
    """Of drafts of which the first is right and the second wrong, a third of a pass is rejected;
    the trace without them is the recorded one."""
    drafted = verified(TRACE, 2, Drafts((1.0, 0.0)))
    decoded = drafted.take(np.flatnonzero((drafted.phase == DECODE) & (drafted.layer == 0)))
    assert decoded.rejected.tolist() == ([False, False, True] * 7 + [False, False]) * 3
    assert drafted.in_vain().sum() == drafted.rejected.sum()
    plain = verified(TRACE, 0, Drafts((0.7,)))
    assert (verified(drafted, 0, Drafts((0.7,))).experts == plain.experts).all()


def test_no_draft_is_the_trace() -> None:
    """Without drafts every request is served as it was, one after another."""
    pairs = zip(verified(TRACE, 0, Drafts((0.7,))).steps(), TRACE.steps(), strict=True)
    assert all(
        one.phase == other.phase and (one.experts == other.experts).all() for one, other in pairs
    )


def test_drafts_pay_where_reading_is_all_and_not_where_loading_is() -> None:
    """One layer and one head read for four tokens in place of four; a link that loads more for
    each token; and drafts that cost more than they save."""
    setting = Setting("lru", scope="global", budget="25%")
    drafts = Drafts((0.8,))
    assert best_draft(workload(LOADS_ALONE), setting, drafts, lengths=(1, 2)).length == 0
    choice = best_draft(workload(READS_ALONE), setting, drafts, lengths=(1, 2, 3))
    assert choice.length == 3 and [row.num_drafts for row in choice.rows] == [0, 1, 2, 3]
    plain, *_, longest = choice.rows
    assert longest.seconds_per_token == pytest.approx(
        plain.seconds_per_token / longest.tokens_per_pass
    )
    assert plain.experts_per_layer == SHAPE.top_k < longest.experts_per_layer
    dear = replace(drafts, draft_s=9.0)
    assert best_draft(workload(READS_ALONE), setting, dear, lengths=(1,)).length == 0


def test_rejected_drafts_route_by_their_own_trace() -> None:
    """Where no draft is right, a pass holds the token's own experts and those of its drafts."""
    other = replace(TRACE, experts=(TRACE.experts + 1) % SHAPE.num_experts)
    rows = verified(TRACE, 1, Drafts((0.0,), rejected=other))
    first = rows.take(np.flatnonzero((rows.layer == 0) & (rows.phase == DECODE)))
    recorded = TRACE.experts[(TRACE.layer == 0) & (TRACE.phase == DECODE)]
    assert (first.experts[:2] == [recorded[0], (recorded[1] + 1) % SHAPE.num_experts]).all()
    with pytest.raises(BadInput, match="other rows"):
        verified(TRACE, 1, Drafts((0.0,), rejected=other.take(np.arange(len(other) - 1))))


@pytest.mark.parametrize(
    ("acceptance", "lengths"), [((), (1,)), ((1.2,), (1,)), ((0.7,), (9,)), ((0.7,), (-1,))]
)
def test_what_is_refused(acceptance: tuple[float, ...], lengths: tuple[int, ...]) -> None:
    with pytest.raises(BadUsage):
        best_draft(workload(LOADS_ALONE), Setting("lru"), Drafts(acceptance), lengths=lengths)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("eviction", "budget", "chance", "length", "ratio"),
    [("lru", "25%", 0.65, 3, 2.33), ("class_lru", "12.5%", 0.65, 1, 1.21)],
)
def test_misses_are_those_of_an_independent_replay(
    eviction: str, budget: str, chance: float, length: int, ratio: float
) -> None:
    """Misses a token over those without drafts, of gpt-oss-20b's trace in one pool: a replay
    written apart from this code gave `ratio`, with another draw of what is accepted. There each
    draft is a use; where rejected ones are none, they go first and fewer loads follow."""
    opened = open_source(TraceSource(trace=Path("gpt-oss-20b")))
    whole = Workload(opened.trace, opened.model, machine("rtx3090-pcie4"))
    setting = Setting(eviction, policies={"eviction": eviction}, scope="global", budget=budget)
    drafts = Drafts((chance,))
    plain, drafted = best_draft(whole, setting, drafts, lengths=(length,)).rows
    num_tokens = np.sum((opened.trace.phase == DECODE) & (opened.trace.layer == 0))
    used = whole.of_trace(replace(verified(whole.trace, length, drafts), rejected=None))
    misses_per_token = used.run(setting).decoding["misses"] / num_tokens
    assert misses_per_token / plain.misses_per_token == pytest.approx(ratio, abs=0.05)
    assert plain.misses_per_token < drafted.misses_per_token < misses_per_token
