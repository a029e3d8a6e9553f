"""Generations that take turns on one session: the tokens and counters of each are those of a run by
itself."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from artifacts.errors import BadInput
from runtime.control.counters import by_layer, totals
from runtime.model.open import MoeModel, open_model
from runtime.session.generate import Sampling
from runtime.session.interleave import Generation, Interleave, _random_state, _set_random_state
from runtime.session.session import Session
from runtime.session.settings import Settings
from tests.conftest import Checkpoint

SETTINGS = Settings(budget="25%", threads=1, preset="specmd")
PROMPTS = [torch.tensor([ids]) for ids in ([5, 9, 2, 14], [7, 7], [3, 1, 4, 1, 5, 9, 2, 6], [11])]
GREEDY = Sampling(max_new_tokens=7, ignore_eos=True)


@pytest.fixture(scope="module")
def opened(checkpoint: Checkpoint) -> MoeModel:
    return open_model(str(checkpoint("olmoe")))


@pytest.fixture
def session(opened: MoeModel) -> Iterator[Session]:
    with Session(opened, SETTINGS) as session:
        yield session


@pytest.fixture
def rows(session: Session) -> Iterator[Interleave]:
    rows = Interleave(session)
    yield rows
    rows.close()


def alone(session: Session, sampling: Sampling) -> list[list[int]]:
    return [[token.token_id for token in session.generate(prompt, sampling)] for prompt in PROMPTS]


def in_turns(generations: list[Generation]) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in generations]
    while not all(generation.is_over for generation in generations):
        for generation, row in zip(generations, tokens, strict=True):
            if not generation.is_over:
                row.append(generation.step().token.token_id)
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_other_generations_change_no_token(
    session: Session, rows: Interleave, temperature: float
) -> None:
    sampling = Sampling(max_new_tokens=7, temperature=temperature, seed=3, ignore_eos=True)
    expected = alone(session, sampling)
    assert in_turns([rows.begin(prompt, sampling) for prompt in PROMPTS]) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)


def test_the_models_own_settings_hold_in_turns(
    session: Session, rows: Interleave, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = alone(session, Sampling(7))
    settings = session.opened.model.generation_config
    monkeypatch.setattr(settings, "stop_strings", [session.opened.tokenizer.decode(without[0][2])])
    monkeypatch.setattr(settings, "begin_suppress_tokens", [without[1][0]])
    expected = alone(session, Sampling(7))
    assert in_turns([rows.begin(prompt, Sampling(7)) for prompt in PROMPTS]) == expected
    assert expected[0] == without[0][:3] and expected[1][0] != without[1][0]


def test_the_counters_of_the_turns_add_up_to_those_of_the_session(
    session: Session, rows: Interleave
) -> None:
    passes: list[set[int]] = []
    session.watcher.on_pass = lambda requests: passes.append(set(requests.tolist()))
    generations = [rows.begin(prompt, GREEDY) for prompt in PROMPTS]
    counters = [generation.step().counters for _ in range(7) for generation in generations]
    assert passes == [{0}, {1}, {2}, {3}] * 7
    assert totals(by_layer(sum(counters))) == session.controller.counters.totals()
    assert all(generation.is_over for generation in generations)


def test_a_generation_that_is_closed_ends_at_once(session: Session, rows: Interleave) -> None:
    expected = alone(session, GREEDY)
    stays, leaves, never = (rows.begin(prompt, GREEDY) for prompt in PROMPTS[:3])
    first = [stays.step().token.token_id]
    leaves.step()
    num_passes = len(session.controller.counters.passes)
    for generation in (leaves, never):
        generation.close()
        assert generation.is_over
    assert len(session.controller.counters.passes) == num_passes
    assert first + in_turns([stays])[0] == expected[0]
    stays.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "moectl-generate"]


def test_an_error_ends_only_its_own_generation(session: Session, rows: Interleave) -> None:
    expected = alone(session, GREEDY)
    stays = rows.begin(PROMPTS[0], GREEDY)
    fails = rows.begin(PROMPTS[2], GREEDY)
    tokens = [stays.step().token.token_id]
    session.watcher.on_step = lambda step: (
        (_ for _ in ()).throw(RuntimeError("broken")) if step.layer == 1 else None
    )
    with pytest.raises(RuntimeError, match="broken"):
        fails.step()
    session.watcher.on_step = None
    assert fails.is_over
    assert tokens + in_turns([stays])[0] == expected[0]


def test_a_prompt_that_is_refused_ends_its_generation(session: Session, rows: Interleave) -> None:
    generation = rows.begin(torch.tensor([[10**6]]), GREEDY)
    with pytest.raises(BadInput, match="outside the vocabulary"):
        generation.step()
    assert generation.is_over


def test_the_seconds_of_a_pass_are_its_own(session: Session, rows: Interleave) -> None:
    begin_s = time.perf_counter()
    generation = rows.begin(PROMPTS[0], GREEDY)
    passes = [generation.step() for _ in range(3)]
    assert all(0 <= each.exposed_s < each.seconds for each in passes)
    assert sum(each.seconds for each in passes) < time.perf_counter() - begin_s
    generation.close()


def test_a_greedy_generation_leaves_the_random_state_alone(rows: Interleave) -> None:
    generation = rows.begin(PROMPTS[0], GREEDY)
    torch.rand(1)
    before = torch.get_rng_state()
    while not generation.is_over:
        generation.step()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_random_state_is_the_hosts_and_every_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    host = torch.get_rng_state()
    device = torch.zeros(16, dtype=torch.uint8)
    given = []
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [device])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", given.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    state = _random_state()
    assert len(state) == 1 and torch.equal(state[0], host)
    _set_random_state(state)
    assert not given
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    _set_random_state(_random_state())
    assert given == [[device]]


def test_the_counters_of_an_endless_run_stay_small(
    session: Session, rows: Interleave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.session.interleave._MANY_PASSES", 3)
    counters = []
    kept = []
    for prompt in PROMPTS:
        generation = rows.begin(prompt, GREEDY)
        while not generation.is_over:
            counters.append(generation.step().counters)
            kept += [len(session.controller.counters.passes), len(session.engine.stall_s)]
    assert max(kept) == 4  # one more than may be kept, which the next pass folds
    assert totals(by_layer(sum(counters))) == session.controller.counters.totals()
