"""Options for drawing tokens, their times, and the prompts that a model can take."""

from dataclasses import FrozenInstanceError, fields
from types import SimpleNamespace

import pytest
import torch

from artifacts.errors import BadInput, BadUsage
from runtime.session.generation.sampling import Sampling, check_prompt, check_tokens
from runtime.session.generation.stream import Token, TokenTiming

PROMPT = torch.tensor([[3, 1, 4]])
FOUND: dict[str, object] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}


def model_of(**config: object) -> SimpleNamespace:
    """Stand in for a model of 10 tokens."""
    return SimpleNamespace(
        config=SimpleNamespace(**config),
        get_input_embeddings=lambda: SimpleNamespace(num_embeddings=10),
    )


# Sampling


def test_defaults_are_greedy() -> None:
    sampling = Sampling()
    assert [getattr(sampling, one.name) for one in fields(sampling)] == [
        128,
        0.0,
        50,
        1.0,
        None,
        0,
        False,
        0.0,
        0.0,
        0.0,
        (),
        None,
        None,
        None,
    ]
    assert sampling.options() == FOUND | {"max_new_tokens": 128}


def test_what_is_drawn_is_asked_for() -> None:
    drawn = {"temperature": 0.5, "top_k": 3, "top_p": 0.9}
    assert Sampling(7, **drawn).options() == drawn | {"max_new_tokens": 7, "do_sample": True}


def test_a_penalty_that_is_not_given_is_the_models() -> None:
    assert "repetition_penalty" not in Sampling(7).options()
    penalty = Sampling(7, repetition_penalty=2).options()["repetition_penalty"]
    assert (penalty, type(penalty)) == (2.0, float)  # generate() refuses an int


def test_who_ignores_the_end_ignores_every_end() -> None:
    ends = {"min_new_tokens": 7, "stop_strings": None, "exponential_decay_length_penalty": None}
    assert Sampling(7, ignore_eos=True).options() == FOUND | {"max_new_tokens": 7} | ends


@pytest.mark.parametrize(
    "given",
    [
        {"max_new_tokens": 1},
        {"temperature": 1e-4},
        {"temperature": 1e4},
        {"top_p": 1e-9},
        {"top_k": 0},
        {"repetition_penalty": 1e-4},
        {"repetition_penalty": 1e4},
    ],
)
def test_what_is_just_possible(given: dict[str, float]) -> None:
    Sampling(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_new_tokens": 0}, "max-new-tokens must be at least 1, not 0"),
        *(
            ({name: value}, "neither beyond 0.0001 and 10000")
            for name, value in (
                ("temperature", 0.9e-4),
                ("temperature", 1.1e4),
                ("temperature", -1.0),
                ("top_p", 0.0),
                ("top_p", -0.5),
                ("top_p", 1.1),
                ("top_k", -1),
                ("repetition_penalty", 0.9e-4),
                ("repetition_penalty", 1.1e4),
                ("repetition_penalty", 0.0),
                ("repetition_penalty", float("nan")),
            )
        ),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, float], said: str) -> None:
    with pytest.raises(BadUsage, match=said):
        Sampling(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"min_p": 1.1}, "0 <= min-p <= 1"),
        ({"min_p": -0.1}, "0 <= min-p <= 1"),
        ({"num_logprobs": -1}, "num-logprobs >= 0"),
        ({"presence_penalty": 101.0}, "between -100 and 100"),
        ({"frequency_penalty": float("nan")}, "between -100 and 100"),
        ({"logit_bias": ((3, 101.0),)}, "between -100 and 100"),
    ],
)
def test_what_is_done_to_logits_is_bounded(given: dict[str, object], said: str) -> None:
    with pytest.raises(BadUsage, match=said):
        Sampling(**given)


def test_min_p_counts_where_tokens_are_drawn() -> None:
    assert Sampling(7, temperature=0.5, min_p=0.1).options()["min_p"] == 0.1
    assert "min_p" not in Sampling(7, min_p=0.1).options()


@pytest.mark.parametrize("value", [Sampling(), Token(5, 0, 0.5)])
def test_values_cannot_be_changed(value: object) -> None:
    name = fields(value)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(value, name, 1)
    assert not hasattr(value, "__dict__")


# TokenTiming


@pytest.mark.parametrize(
    ("seconds", "ttft_ms", "tpot_ms"),
    [([], 0, 0), ([0.25], 250, 0), ([0.25, 0.5], 250, 250), ([1, 2, 2, 4], 1e3, 1e3)],
)
def test_times_are_to_the_first_token_and_from_one_to_the_next(
    seconds: list[float], ttft_ms: float, tpot_ms: float
) -> None:
    timing = TokenTiming(seconds)
    assert (timing.ttft_ms, timing.tpot_ms) == (ttft_ms, tpot_ms)
    assert not hasattr(timing, "__dict__") and TokenTiming().seconds == []


# Prompts


def test_prompts_that_the_model_cannot_take() -> None:
    model = model_of(max_position_embeddings=8)
    for prompt, num_new, said in (
        (torch.zeros(1, 0), 1, "the prompt is empty"),
        (torch.tensor([[3, 10]]), 1, "token 10 is outside the vocabulary of 10"),
        (PROMPT, 6, "3 prompt tokens and 6 new ones exceed the model's 8 positions"),
    ):
        with pytest.raises(BadInput, match=said):
            check_prompt(model, prompt, num_new)
    check_prompt(model, torch.tensor([[9, 3, 1]]), 5)


def test_a_model_without_a_number_of_positions_takes_any() -> None:
    for config in ({}, {"max_position_embeddings": None}):
        check_tokens(model_of(**config), highest=9, length=10**9, what="they")
    model = model_of(max_position_embeddings=1)
    check_tokens(model, highest=0, length=1, what="they")
    with pytest.raises(BadInput, match="they exceed the model's 1 positions"):
        check_tokens(model, highest=0, length=2, what="they")
