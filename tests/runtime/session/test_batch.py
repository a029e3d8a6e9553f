"""Requests that share passes: their answers and logits are those of a run alone, and their charges
add up."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from artifacts.errors import BadInput
from runtime.control.build import build_controller
from runtime.control.counters import Counter
from runtime.model.open import MoeModel, open_model
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope
from runtime.replay.replay import replay
from runtime.session.generation import batch as batch_module
from runtime.session.generation.batch import RequestBatch, RowResult
from runtime.session.generation.charges import Charge
from runtime.session.generation.round_robin import RoundRobin, open_batch
from runtime.session.generation.sampling import Sampler, Sampling, draw
from runtime.session.session import Session
from runtime.session.settings import Settings
from tests.conftest import Checkpoint
from tests.helpers.families import FAMILIES, save
from tests.helpers.uncollected import live_nbytes, uncollected

pytestmark = pytest.mark.slow

SETTINGS = Settings(budget="50%", threads=1, preset="specmd")
PROMPTS = [
    torch.tensor([ids])
    for ids in ([5, 9, 2, 14], [7, 7], [3, 1, 4, 1, 5, 9, 2, 6], [11], [5, 9, 2, 15])
]
SIX = Sampling(max_new_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def opened(checkpoint: Checkpoint) -> MoeModel:
    return open_model(str(checkpoint("olmoe")))


@pytest.fixture
def session(opened: MoeModel) -> Iterator[Session]:
    with Session(opened, SETTINGS) as session:
        yield session


def to_end(batch: RequestBatch | RoundRobin) -> list[RowResult]:
    results = []
    while not batch.is_idle:
        results += batch.step()
    return results


def answers(batch: RequestBatch | RoundRobin, sampling: Sampling = SIX) -> list[list[int]]:
    """Of all prompts, in their order."""
    numbers = [batch.add(prompt, sampling) for prompt in PROMPTS]
    found: dict[int, list[int]] = defaultdict(list)
    for result in to_end(batch):
        if result.token_id is not None:
            found[result.request].append(result.token_id)
    return [found[number] for number in numbers]


def alone(session: Session, sampling: Sampling = SIX) -> list[list[int]]:
    return [[token.token_id for token in session.tokens(prompt, sampling)] for prompt in PROMPTS]


WINDOWED = [("mixtral", 4), ("gpt_oss", 4)]  # shorter than the prompts


@pytest.mark.parametrize(
    ("family", "window"), [*((family, None) for family in FAMILIES), *WINDOWED]
)
def test_logits_of_every_family_are_those_of_a_run_alone(
    family: str,
    window: int | None,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[Sampler, list[torch.Tensor]] = defaultdict(list)

    def seen_draw(samplers: list[Sampler], logits: torch.Tensor) -> list:
        for sampler, row in zip(samplers, logits, strict=True):
            seen[sampler].append(row)
        return draw(samplers, logits)

    monkeypatch.setattr(batch_module, "draw", seen_draw)
    path = (
        save(family, "hub", tmp_path, fields={"sliding_window": window})
        if window
        else checkpoint(family)
    )
    with Session(open_model(str(path)), SETTINGS) as session:
        with RequestBatch(session, rows=3, tile=5) as batch:
            answered = answers(batch)
        assert answered == alone(session)
        for sampler, logits in seen.items():
            whole = session.forward(sampler.tokens).logits[0]
            expected = whole[-len(logits) - 1 : -1]
            assert (torch.stack(logits) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_drawn_answer_follows_its_own_seed_and_options(session: Session) -> None:
    drawn = [
        Sampling(
            max_new_tokens=9, temperature=0.9, seed=3, ignore_eos=True, repetition_penalty=1.3
        ),
        Sampling(max_new_tokens=5, temperature=1.5, seed=4, top_k=7),
        Sampling(max_new_tokens=7, repetition_penalty=1.2),
        Sampling(max_new_tokens=1),
        Sampling(max_new_tokens=20, temperature=1.0, top_p=0.8),
    ]
    with RequestBatch(session) as batch:
        for prompt, sampling in zip(PROMPTS, drawn, strict=True):
            batch.add(prompt, sampling)
        found = defaultdict(list)
        for result in to_end(batch):
            found[result.request].append(result.token_id)
    expected = [
        [token.token_id for token in session.tokens(prompt, sampling)]
        for prompt, sampling in zip(PROMPTS, drawn, strict=True)
    ]
    assert list(found.values()) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_models_own_settings_hold_in_a_batch(
    session: Session, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = Sampling(7, temperature=temperature, ignore_eos=False)
    without = alone(session, drawn)
    settings = session.opened.model.generation_config
    monkeypatch.setattr(settings, "stop_strings", [session.opened.tokenizer.decode(without[0][2])])
    monkeypatch.setattr(settings, "begin_suppress_tokens", [without[1][0]])
    expected = alone(session, drawn)
    with RequestBatch(session) as batch:
        assert answers(batch, drawn) == expected
    assert len(expected[0]) <= 3 and expected[1][0] != without[1][0]
    unstopped = Sampling(7, temperature=temperature, ignore_eos=True)
    with RequestBatch(session) as batch:
        assert [len(tokens) for tokens in answers(batch, unstopped)] == [7] * len(PROMPTS)


def test_requests_that_come_and_go_change_no_answer(session: Session) -> None:
    expected = alone(session)
    with RequestBatch(session, rows=2, tile=3) as batch:
        found = defaultdict(list)
        for prompt in PROMPTS[:3]:
            batch.add(prompt, SIX)
        dropped = batch.add(torch.tensor([[8, 8, 8, 8, 8, 8, 8]]), SIX)
        results = batch.step() + batch.step()
        batch.cancel(dropped)
        results += [*batch.step(), *batch.step()]
        for prompt in PROMPTS[3:]:
            batch.add(prompt, SIX)
        gone = batch.add(PROMPTS[0], SIX)
        while not batch.is_idle:
            results += batch.step()
            if any(result.request == gone for result in results):
                batch.cancel(gone)
        for result in results:
            if result.token_id is not None and result.request not in (dropped, gone):
                found[result.request].append(result.token_id)
        assert list(found.values()) == expected
        assert batch.num_running == batch.num_waiting == 0
        assert not batch.memory.blocks
    session.validate()


def test_charges_add_up_to_the_counters(session: Session) -> None:
    with RequestBatch(session, rows=3) as batch:
        for number, prompt in enumerate(PROMPTS):
            batch.add(prompt, SIX, owner=number % 2)
        results = to_end(batch)
    assert {result.owner for result in results} == {0, 1}
    counted = session.controller.counters.sum()
    charged = sum((result.charge for result in results), Charge())
    assert counted[Counter.FETCHED].sum() > 0 and counted[Counter.HITS].sum() > 0
    np.testing.assert_allclose(charged.counters, counted, atol=1e-9)
    assert charged.exposed_s == pytest.approx(sum(session.engine.stall_s))
    assert charged.passes == pytest.approx(session.num_passes)


def test_equal_beginnings_are_computed_once(session: Session) -> None:
    system = list(range(3, 43))
    prompts = [
        torch.tensor([[*system, *tail]]) for tail in ([50, 51], [52], [53, 54, 55], [50, 51, 60])
    ]
    expected = [[token.token_id for token in session.tokens(prompt, SIX)] for prompt in prompts]
    with RequestBatch(session, tile=32) as batch:
        found = defaultdict(list)
        reused = {}
        passes = []
        session.watcher.on_pass = lambda requests: passes.append(len(requests))
        for prompt in prompts:
            batch.add(prompt, SIX)
        for result in to_end(batch):
            reused[result.request] = result.num_reused
            if result.token_id is not None:
                found[result.request].append(result.token_id)
    session.watcher.on_pass = None
    assert list(reused.values()) == [0, 40, 40, 42]
    assert list(found.values()) == expected
    assert sum(passes) == sum(prompt.shape[1] for prompt in prompts) - 122 + len(prompts) * 5


def test_keys_and_values_stay_within_the_room(session: Session) -> None:
    token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, numbers a head, bytes
    with RequestBatch(session, rows=5, room=3 * 64 * token) as batch:
        most = 0
        for prompt in PROMPTS:
            batch.add(prompt, SIX)
        while not batch.is_idle:
            batch.step()
            most = max(most, batch.num_running)
        assert batch.memory.token_nbytes == token
        assert most == 2


def test_keys_and_values_in_ram_change_no_answer(session: Session) -> None:
    """On a CPU they lie there anyhow; what is another on a GPU is where blocks are made."""
    with RequestBatch(session, rows=3, tile=4) as usual:
        expected = answers(usual)
    with RequestBatch(session, rows=3, tile=4, in_ram=True) as batch:
        assert answers(batch) == expected
        assert batch.memory.begin(8).block.in_ram


def test_the_model_is_given_back_as_it_was(session: Session) -> None:
    expected = alone(session)
    with RequestBatch(session) as batch:
        batch.add(PROMPTS[0], SIX)
        batch.step()
        with pytest.raises(BadInput, match="empty"):
            batch.add(torch.zeros((1, 0), dtype=torch.int64), SIX)
        with pytest.raises(BadInput, match="positions"):
            batch.add(PROMPTS[0], Sampling(max_new_tokens=1000))
    assert alone(session) == expected
    assert session.engine.steps.on_plan is None
    assert "one at a time" not in " ".join(session.fallbacks)


def test_requests_that_cannot_share_a_pass_go_one_by_one(opened: MoeModel) -> None:
    with Session(opened, Settings(budget="50%", threads=1, preset="monde-static")) as session:
        expected = alone(session)
        with open_batch(session, rows=4) as batch:
            assert isinstance(batch, RoundRobin)
            assert answers(batch) == expected
            first, second = (batch.add(PROMPTS[0], SIX) for _ in range(2))
            results = batch.step()
            batch.cancel(first)
            results += to_end(batch)
            assert [result.request for result in results] == [first] + [second] * 6
        assert "answered one at a time: --residency" in " ".join(session.receipt()["fallbacks"])


@pytest.mark.parametrize(("way", "num_failed"), [(RequestBatch, 2), (RoundRobin, 1)])
def test_a_pass_that_fails_ends_the_requests_in_it(
    session: Session, way: type, num_failed: int
) -> None:
    def fail(requests: np.ndarray) -> None:
        session.watcher.on_pass = None
        raise ValueError("broken")

    expected = alone(session)[num_failed:3]
    with way(session, rows=2) as batch:
        numbers = [batch.add(prompt, SIX) for prompt in PROMPTS[:3]]
        batch.step()
        session.watcher.on_pass = fail
        failed = batch.step()
        assert [(one.request, one.is_over, str(one.error)) for one in failed] == [
            (number, True, "broken") for number in numbers[:num_failed]
        ]
        found: dict[int, list[int]] = defaultdict(list)
        for result in to_end(batch):
            found[result.request].append(result.token_id)
    assert [found[number] for number in numbers[num_failed:]] == expected and len(
        found
    ) == 3 - num_failed
    session.validate()


@pytest.mark.parametrize("way", [RequestBatch, RoundRobin])
def test_requests_that_are_over_hold_no_memory(
    session: Session, way: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many bytes after many requests as after a few, without the collector; some are drawn, some
    fail, some are left."""
    drawn = Sampling(max_new_tokens=2, temperature=0.9, ignore_eos=True)
    rows = {} if way is RoundRobin else {"room": 1 << 17}
    random = torch.Generator().manual_seed(0)

    def broken(*_: object) -> torch.Tensor:
        raise ValueError("broken")

    def ask(batch: RequestBatch | RoundRobin, numbers: range) -> int:
        for number in numbers:
            sampling = Sampling(max_new_tokens=2, ignore_eos=True) if number % 4 else drawn
            request = batch.add(torch.randint(3, 90, (1, 60), generator=random), sampling)
            if number % 4 == 1:
                with monkeypatch.context() as patched:
                    patched.setattr(session.opened.layers[1].experts, "moectl_forward", broken)
                    [failed] = batch.step()
                assert (
                    "in broken" in failed.error.__notes__[0] and failed.error.__traceback__ is None
                )
            elif number % 4 == 2:
                batch.step()
                batch.cancel(request)
            to_end(batch)
        return live_nbytes()

    with way(session, rows=4, **rows) as batch, uncollected():
        after = ask(batch, range(8))
        assert ask(batch, range(8, 24)) == after
        assert batch.kept.nbytes <= batch.kept.most_nbytes == (0 if way is RoundRobin else 1 << 14)


def test_the_row_that_goes_on_does_not_hold_what_was_forgotten_of_its_prompt(
    session: Session,
) -> None:
    with RequestBatch(session, kept_nbytes=0) as batch:
        batch.add(PROMPTS[0], SIX)
        batch.step()
        [row] = batch._running.values()
        assert row.prompt.line is None and row.line.length == PROMPTS[0].shape[1]
        assert batch.kept.most_nbytes == batch.kept.nbytes == 0


def test_a_step_may_prefetch_what_the_link_moves_beside_so_many_rows(opened: MoeModel) -> None:
    with Session(opened, Settings(budget="50%", preset="specmd", link="1000GB/s")) as session:
        arrivals = session.controller.mover.arrivals
        arrivals.window = 1
        with RequestBatch(session, rows=64):
            assert arrivals.window > 1
        assert arrivals.window == 1 and session.num_passes == 0
    with (
        Session(opened, Settings(budget="50%", preset="specmd", window="1KiB")) as told,
        RequestBatch(told, rows=64),
    ):
        assert told.controller.mover.arrivals.window == 1024


def test_a_replay_of_a_batch_counts_as_the_batch(session: Session) -> None:
    recorder = session.record()
    with RequestBatch(session, rows=3, tile=4) as batch:
        window = session.controller.mover.arrivals.window
        answers(batch)
    receipt = session.receipt()
    again = build_controller(
        build(receipt["policies"]),
        session.opened.shape,
        num_slots=receipt["slots"],
        scope=Scope(receipt["scope"]),
        window=window,
        artefacts=Artefacts(),
    )
    replay(recorder.trace(), again)
    live = session.controller
    assert np.array_equal(live.counters.passes, again.counters.passes)
    assert live.counters.totals()["prefetches"] > 0
    assert np.array_equal(live.cache.state, again.cache.state)
