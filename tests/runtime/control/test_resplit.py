"""Splits solved anew between requests: when, with what result, and the same in live runs and
replays."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from artifacts.errors import BadUsage, OutOfResources
from artifacts.hardware.machines import HERE, machine
from artifacts.modelshapes.known import ModelShape
from artifacts.shape import Shape
from artifacts.splits.solve import SOLVERS, Latencies, SolvedSplit
from artifacts.traces.synthetic import Dials, generate
from artifacts.traces.trace import Trace
from runtime.control.build import build_controller, fast_tier, lay_out
from runtime.control.sizes import budget_nbytes
from runtime.control.splits.resplit import EVERY, NOT_ANEW, Reconfiguration, tokens_between
from runtime.model.open import MoeModel, open_model
from runtime.policies import build
from runtime.policies.base import Artefacts, Split, Step
from runtime.policies.presets import Scope, preset
from runtime.replay.replay import _begin_idle, replay
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint
from tests.helpers.families import VOCABULARY
from tests.runtime.session.test_session import plain_model
from tools.torments.interrupting import allocations

LATENCIES = Latencies(attention_s=1.0, moe_s=1.0, head_s=1.0, load_s=1.0)
BUDGET = "60%"
WINDOW = 3072
POLICIES = build(preset("moepic").texts() | {"residency": "split:theta=None"})


def solved(shape: Shape) -> Artefacts:
    """Return a split that no solver would find, so that solving it anew changes it."""
    nbytes = budget_nbytes(BUDGET, shape)
    budgets = np.full(shape.num_layers, nbytes / shape.expert_nbytes / shape.num_layers)
    return Artefacts(
        splits=(SolvedSplit(nbytes, HERE, budgets, np.full(shape.num_layers, 0.3), LATENCIES),)
    )


def session_of(opened: MoeModel, every: int | None, **changed: object) -> Session:
    settings = Settings(
        "moepic",
        budget=BUDGET,
        link="1GB/s",
        window=f"{WINDOW}B",
        reconfigure_every=every,
        **changed,
    )
    return Session(opened, settings, artefacts=solved(opened.shape))


def decode(session: Session, num_requests: int) -> list[torch.Tensor]:
    """Decode requests one after another, each a prompt of 7 tokens and 3 after it; returns the
    logits of every pass."""
    generator = torch.Generator().manual_seed(5)
    logits = []
    for _ in range(num_requests):
        session.new_requests(1)
        ids = torch.randint(3, VOCABULARY, (1, 10), generator=generator)
        output = session.forward(ids[:, :7])
        logits.append(output.logits)
        for position in range(7, 10):
            output = session.forward(ids[:, position : position + 1], past=output.past_key_values)
            logits.append(output.logits)
    return logits


@pytest.fixture(scope="module", params=["olmoe", "gpt_oss"])
def folder(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> str:
    return str(checkpoint(request.param))


def test_live_equals_replay_and_the_plain_model(folder: str) -> None:
    plain = plain_model(folder)
    opened = open_model(folder)
    with session_of(opened, 15) as session:
        recorder = session.record()
        ours = decode(session, 6)
        counts = session.receipt()["reconfigured"]
        live = session.controller.counters.passes
        session.controller.cache.validate()
        slots = session.parts.slots
    assert counts["every_tokens"] == 15 and counts["solved_anew"] == 2 and counts["changed"] >= 1
    assert slots.nbytes <= 0.6 * opened.shape.nbytes + 64 * len(slots)
    with session_of(opened, 0) as session:
        assert session.receipt()["reconfigured"] == {}
        kept = decode(session, 6)
    for mine, right in zip(ours, kept, strict=True):
        assert (mine - right).abs().max() <= 1e-5 * right.abs().max()
    with torch.inference_mode():
        ids = torch.randint(3, VOCABULARY, (1, 10), generator=torch.Generator().manual_seed(5))
        right = plain(ids[:, :7]).logits
    assert (ours[0] - right).abs().max() <= 1e-5 * right.abs().max()
    again, replayed = replayed_counters(recorder.trace(), opened.shape, 15)
    assert again == counts
    np.testing.assert_array_equal(replayed, live)


def replayed_counters(
    trace: Trace, shape: Shape, every: int
) -> tuple[dict[str, int], list[np.ndarray]]:
    known = solved(shape)
    policies = build(preset("moepic").texts() | {"residency": "split:theta=None"})
    fast = fast_tier(policies, shape, BUDGET, scope=Scope.LAYER, artefacts=known)
    owner = build_controller(
        policies,
        shape,
        num_slots=fast.num_slots,
        split=fast.split,
        scope=Scope.LAYER,
        window=WINDOW,
        artefacts=known,
    )
    reconfiguration = Reconfiguration(
        policies,
        shape,
        fast.split,
        every=every,
        lay_out=lambda other: lay_out(owner, policies, other, Scope.LAYER),
    )
    replay(trace, owner, reconfiguration=reconfiguration)
    owner.cache.validate()
    return reconfiguration.receipt(), owner.counters.passes


def test_never_within_a_request(folder: str) -> None:
    """A request is never interrupted, however long it is; and tokens seen before the last solving
    do not count again."""
    with session_of(open_model(folder), 1) as session:
        session.new_requests(1)
        output = session.forward(torch.arange(3, 20)[None])
        for _ in range(4):
            output = session.forward(torch.tensor([[5]]), past=output.past_key_values)
        assert session.reconfiguration.num_solved == 0
        session.new_requests(1)
        session.new_requests(1)
        assert session.reconfiguration.num_solved == 1


SHAPE = Shape(num_layers=3, num_experts=12, top_k=3, expert_nbytes=3 * 64 * 32 * 2)
MODEL = ModelShape("small", SHAPE, hidden=64, vocabulary=100)


def test_the_simulator_says_how_often() -> None:
    trace = generate(Dials(tokens=160, requests=8, prompt=8), SHAPE)
    tried = Workload(trace, MODEL, machine("a100-pcie4"))
    policies = {"residency": "split:theta=None"}
    outcome = tried.run(Setting("often", "moepic", policies, budget="30%", reconfigure_every=40))
    assert (outcome.split["every_tokens"], outcome.split["solved_anew"]) == (40, 3)
    assert (
        "every_tokens"
        not in tried.run(
            Setting("never", "moepic", policies, budget="30%", reconfigure_every=0)
        ).split
    )


def test_idle_is_where_every_request_has_ended() -> None:
    """Two requests decoded together, one of them longer; then a third."""
    rows = [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (2, 3), (2, 4), (3, 5)]
    request, pass_ = np.array(rows, np.int32).T
    zeros = np.zeros(len(rows), np.int32)
    trace = Trace(
        request=request,
        pass_=pass_,
        phase=zeros.astype(np.uint8),
        layer=zeros,
        token=pass_,
        experts=zeros[:, None].astype(np.uint16),
        weights=np.ones((len(rows), 1), np.float32),
    )
    assert _begin_idle(trace) == {3, 5}
    assert _begin_idle(
        replace(trace, request=np.where(pass_ == 4, 0, request).astype(np.int32))
    ) == {5}


def test_what_was_seen_may_not_tell() -> None:
    """After a trace without one of the layers the split stays, and that is counted."""
    split = Split(np.array([3, 3, 3]), np.array([2, 2, 2]), 1, solved(SHAPE).splits[0])
    watched = Reconfiguration(POLICIES, SHAPE, split, every=1, lay_out=pytest.fail)
    watched.begin_pass(np.zeros(1, np.int32))
    step = Step(
        0,
        1,
        0,
        np.array([[0, 1, 2]]),
        np.ones((1, 3), np.float32),
        predicted=np.ones((1, 2, 12), np.float32),
    )
    watched.add(step)
    watched.between_requests()
    assert watched.receipt() == {
        "every_tokens": 1,
        "solved_anew": 0,
        "changed": 0,
        "could_not_tell": 1,
    }


def test_after_how_many_tokens() -> None:
    by_solver = Split(np.ones(1), np.ones(1), 1, solved(SHAPE).splits[0])
    alike = replace(by_solver, solved=replace(by_solver.solved, solver="even"))
    given = replace(by_solver, solved=None)
    blind = build(preset("moepic").texts() | {"prefetch": "frequency"})
    assert tokens_between(None, by_solver, POLICIES) == EVERY == 5_000
    for split, policies in (
        (alike, POLICIES),
        (given, POLICIES),
        (None, POLICIES),
        (by_solver, blind),
    ):
        assert tokens_between(None, split, policies) == tokens_between(0, split, policies) == 0
    assert tokens_between(70, by_solver, POLICIES) == tokens_between(70, alike, POLICIES) == 70
    for split, policies in ((given, POLICIES), (None, POLICIES), (by_solver, blind)):
        with pytest.raises(BadUsage, match="run `moectl split`"):
            tokens_between(70, split, policies)
    with pytest.raises(BadUsage, match="not -1"):
        tokens_between(-1, by_solver, POLICIES)


def test_passes_that_never_got_to_a_router_tell_nothing(folder: str) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("in attention")

    opened = open_model(folder)
    with session_of(opened, 15) as session:
        handle = opened.layers[0].gate.register_forward_pre_hook(broken)
        with pytest.raises(RuntimeError, match="in attention"):
            session.forward(torch.full((1, 20), 5))
        handle.remove()
        decode(session, 1)
        assert session.receipt()["reconfigured"]["could_not_tell"] == 1
        session.validate()
    opened.store.close()


def test_no_memory_for_other_slots_ends_the_session_in_so_many_words(folder: str) -> None:
    opened = open_model(folder)
    with session_of(opened, 15) as session:
        decode(session, 2)
        with pytest.raises(OutOfResources), allocations(1):
            session.new_requests(1)
        with pytest.raises(BadUsage, match="session is closed"):
            decode(session, 1)
    with session_of(opened, 15) as session:
        decode(session, 3)
        session.validate()
    opened.store.close()


def test_on_several_devices_a_split_stays(checkpoint: Checkpoint) -> None:
    """The receipt says so where the split would be solved anew on one device."""
    opened = open_model(str(checkpoint("olmoe")))
    (split,) = solved(opened.shape).splits
    known = Artefacts(splits=(replace(split, solver=SOLVERS[0]),))
    settings = {"budget": BUDGET, "link": "1GB/s", "window": f"{WINDOW}B"}
    for devices in (1, 2):
        with Session(
            opened, Settings("moepic", devices=devices, **settings), artefacts=known
        ) as session:
            assert (session.reconfiguration is None, NOT_ANEW in session.fallbacks) == (
                devices == 2,
                devices == 2,
            )
            decode(session, 1)
    with pytest.raises(BadUsage, match="on one device only"):
        Session(
            opened, Settings("moepic", devices=2, reconfigure_every=9, **settings), artefacts=known
        )
