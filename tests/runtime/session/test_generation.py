"""Generations that take turns on one session: the tokens and counters of each are those of a run by
itself."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from artifacts.errors import BadInput
from runtime.control.counters import by_layer, totals
from runtime.model.open import MoeModel, open_model
from runtime.session.generation.round_robin import RoundRobin
from runtime.session.generation.sampling import Sampling
from runtime.session.generation.single import Generation
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


def alone(session: Session, sampling: Sampling) -> list[list[int]]:
    return [[token.token_id for token in session.tokens(prompt, sampling)] for prompt in PROMPTS]


def in_turns(session: Session, generations: list[Generation]) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in generations]
    while not all(generation.is_over for generation in generations):
        for generation, row in zip(generations, tokens, strict=True):
            if not generation.is_over:
                row.append(session.step(generation)[0][0].token_id)
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_other_generations_change_no_token(session: Session, temperature: float) -> None:
    sampling = Sampling(max_new_tokens=7, temperature=temperature, seed=3, ignore_eos=True)
    expected = alone(session, sampling)
    assert in_turns(session, [session.begin(prompt, sampling) for prompt in PROMPTS]) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)


def test_the_models_own_settings_hold_in_turns(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = alone(session, Sampling(7))
    settings = session.opened.model.generation_config
    monkeypatch.setattr(settings, "stop_strings", [session.opened.tokenizer.decode(without[0][2])])
    monkeypatch.setattr(settings, "begin_suppress_tokens", [without[1][0]])
    expected = alone(session, Sampling(7))
    assert in_turns(session, [session.begin(prompt, Sampling(7)) for prompt in PROMPTS]) == expected
    assert expected[0] == without[0][:3] and expected[1][0] != without[1][0]


def test_the_counters_of_the_turns_add_up_to_those_of_the_session(session: Session) -> None:
    passes: list[set[int]] = []
    session.watcher.on_pass = lambda requests: passes.append(set(requests.tolist()))
    generations = [session.begin(prompt, GREEDY) for prompt in PROMPTS]
    counters = [
        session.step(generation)[1].counters for _ in range(7) for generation in generations
    ]
    assert passes == [{0}, {1}, {2}, {3}] * 7
    assert totals(by_layer(sum(counters))) == session.controller.counters.totals()
    assert all(generation.is_over for generation in generations)


def test_a_generation_that_is_closed_ends_at_once(session: Session) -> None:
    expected = alone(session, GREEDY)
    stays, leaves, never = (session.begin(prompt, GREEDY) for prompt in PROMPTS[:3])
    first = [session.step(stays)[0][0].token_id]
    session.step(leaves)
    num_passes = len(session.controller.counters.passes)
    for generation in (leaves, never):
        generation.close()
        assert generation.is_over
    assert len(session.controller.counters.passes) == num_passes
    assert first + in_turns(session, [stays])[0] == expected[0]
    stays.close()


def test_an_error_ends_only_its_own_generation(session: Session) -> None:
    expected = alone(session, GREEDY)
    stays = session.begin(PROMPTS[0], GREEDY)
    fails = session.begin(PROMPTS[2], GREEDY)
    tokens = [session.step(stays)[0][0].token_id]
    session.watcher.on_step = lambda step: (
        (_ for _ in ()).throw(RuntimeError("broken")) if step.layer == 1 else None
    )
    with pytest.raises(RuntimeError, match="broken"):
        session.step(fails)
    session.watcher.on_step = None
    assert fails.is_over
    assert tokens + in_turns(session, [stays])[0] == expected[0]


def test_a_prompt_that_is_refused_is_no_request(session: Session) -> None:
    with pytest.raises(BadInput, match="outside the vocabulary"):
        session.begin(torch.tensor([[10**6]]), GREEDY)
    assert session.new_requests(1) == 0


def test_the_seconds_of_a_pass_are_its_own(session: Session) -> None:
    begin_s = time.perf_counter()
    generation = session.begin(PROMPTS[0], GREEDY)
    passes = [session.step(generation)[1] for _ in range(3)]
    assert all(0 <= each.exposed_s < each.seconds for each in passes)
    assert sum(each.seconds for each in passes) < time.perf_counter() - begin_s
    generation.close()


def test_a_generation_leaves_the_random_state_alone(session: Session) -> None:
    before = torch.get_rng_state()
    for temperature in (0.0, 1.0):
        in_turns(session, [session.begin(PROMPTS[0], Sampling(3, temperature=temperature))])
    assert torch.equal(torch.get_rng_state(), before)


def test_the_seed_decides_what_is_drawn(session: Session) -> None:
    drawn = [
        in_turns(session, [session.begin(PROMPTS[0], Sampling(9, temperature=2.0, seed=seed))])
        for seed in (4, 4, 5)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_keys_and_values_are_freed_at_the_end(session: Session) -> None:
    generation = session.begin(PROMPTS[0], GREEDY)
    session.step(generation)
    assert generation.sampler.inputs["past_key_values"].get_seq_length() == 4
    in_turns(session, [generation])
    assert not generation.sampler.inputs


def test_the_counters_of_an_endless_run_stay_small(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.session.generation.batch._MANY_PASSES", 3)
    counters = []
    kept = []
    with RoundRobin(session) as requests:
        for prompt in PROMPTS:
            requests.add(prompt, GREEDY)
        while not requests.is_idle:
            counters += [result.charge.counters for result in requests.step()]
            kept += [len(session.controller.counters.passes), len(session.engine.stall_s)]
    assert max(kept) == 4  # one more than may be kept, which the next pass folds
    assert totals(by_layer(np.sum(counters, axis=0))) == session.controller.counters.totals()
