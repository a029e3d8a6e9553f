"""The stream of tokens over a model that is a list: what generate() is asked for, and what becomes
of its tokens."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from artifacts.errors import BadInput, BadUsage
from runtime.session.generate import Sampling, Token, TokenTiming, check_tokens, stream

PROMPT = torch.tensor([[3, 1, 4]])
FOUND: dict[str, object] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}


class Listed:
    """Stands in for a model of 10 tokens and 8 positions: `generate` gives the streamer the prompt,
    then each of `steps`, of one token or more."""

    def __init__(
        self,
        *steps: list[int],
        fails: BaseException | None = None,
        begins: Callable[[], object] = lambda: None,
    ) -> None:
        self.config = SimpleNamespace(max_position_embeddings=8)
        self.dtype = torch.float32
        self.steps = steps
        self.fails = fails
        self.begins = begins
        self.num_given = 0
        self.given: dict[str, object] = {}

    def get_input_embeddings(self) -> SimpleNamespace:
        return SimpleNamespace(num_embeddings=10)

    def generate(self, prompt: torch.Tensor, **given: object) -> None:
        self.begins()
        self.given = {"prompt": prompt, "drawn": torch.rand(3).tolist()} | given
        given["streamer"].put(prompt)
        for step in self.steps:
            given["streamer"].put(torch.tensor(step))
            self.num_given += 1
            if given["stopping_criteria"](prompt, None).all():
                break
        if self.fails:
            raise self.fails
        given["streamer"].end()


def ids(tokens: Iterator[Token]) -> list[int]:
    return [token.token_id for token in tokens]


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "moectl-generate"]


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


# stream


def test_tokens_come_with_their_index_and_time() -> None:
    begin_s = time.perf_counter()
    tokens = list(stream(Listed([5], [6], [7]), PROMPT, Sampling(3)))
    took_s = time.perf_counter() - begin_s
    assert [(token.token_id, token.index) for token in tokens] == [(5, 0), (6, 1), (7, 2)]
    seconds = [token.seconds for token in tokens]
    assert seconds[0] > 0 and seconds == sorted(seconds) and seconds[-1] < took_s


def test_of_several_tokens_at_once_none_is_lost() -> None:
    tokens = list(stream(Listed([5], [6, 7], [8]), PROMPT, Sampling(4)))
    assert [(token.token_id, token.index) for token in tokens] == [(5, 0), (6, 1), (7, 2), (8, 3)]


def test_what_generate_is_asked_for() -> None:
    model = Listed([5])
    tokenizer = object()
    list(stream(model, PROMPT, Sampling(3, repetition_penalty=1.5), tokenizer=tokenizer))
    assert model.given["prompt"] is PROMPT and model.given["tokenizer"] is tokenizer
    assert model.given["attention_mask"].tolist() == [[1, 1, 1]]
    assert model.given["attention_mask"].dtype == torch.int64
    assert Sampling(3, repetition_penalty=1.5).options().items() <= model.given.items()


def test_the_generating_thread_computes_with_the_callers_number_of_threads() -> None:
    """Products round differently with torch's default number, which a new thread has."""
    openmp = next(Path(torch.__file__).parent.glob("lib/libgomp*"), None)
    if openmp is None:
        pytest.skip("this torch does not come with GNU's OpenMP, which is asked here")
    # torch.get_num_threads() would set the number of a new thread before it tells it, as a product
    # would not.
    num_threads_of_this = ctypes.CDLL(str(openmp)).omp_get_max_threads
    before = torch.get_num_threads()
    seen = []
    model = Listed([5], begins=lambda: seen.append(num_threads_of_this()))
    try:
        for num_threads in (before + 1, before + 2):
            torch.set_num_threads(num_threads)
            list(stream(model, PROMPT, Sampling(1)))
        assert seen == [before + 1, before + 2]
    finally:
        torch.set_num_threads(before)


def test_the_seed_decides_what_is_drawn_and_nobody_elses_draws_change() -> None:
    before = torch.get_rng_state()
    drawn = []
    for seed in (4, 4, 5):
        model = Listed([5])
        list(stream(model, PROMPT, Sampling(1, seed=seed)))
        drawn.append(model.given["drawn"])
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_that_is_closed_stops_the_generation() -> None:
    model = Listed(*([5] for _ in range(100_000)))
    said = []
    tokens = stream(model, PROMPT, Sampling(5), turn=turn_of(True, said, waits_s=0.05))
    assert next(tokens).token_id == 5 and len(alive()) == 1 and alive()[0].daemon
    tokens.close()
    assert model.num_given < 100_000 and said[-1] == "over"
    assert not alive()


def test_an_error_comes_after_the_tokens_before_it() -> None:
    tokens = stream(Listed([5], fails=RuntimeError("broken")), PROMPT, Sampling(3))
    assert next(tokens).token_id == 5
    with pytest.raises(RuntimeError, match="broken"):
        next(tokens)
    assert not alive()


def turn_of(may_begin: bool, said: list[str], *, waits_s: float = 0.0) -> Callable:
    @contextmanager
    def turn(stop: threading.Event) -> Iterator[bool]:
        said.append(f"{threading.current_thread().name} {stop.is_set()}")
        yield may_begin
        time.sleep(waits_s)
        said.append("over")

    return turn


def test_a_generation_waits_for_its_turn_and_gives_it_back() -> None:
    said: list[str] = []
    model = Listed([5])
    assert ids(stream(model, PROMPT, Sampling(1), turn=turn_of(True, said))) == [5]
    assert said == ["moectl-generate False", "over"]
    model = Listed([5])
    assert ids(stream(model, PROMPT, Sampling(1), turn=turn_of(False, said))) == []
    assert said[2:] == said[:2] and not model.given


# Prompts


def test_prompts_that_the_model_cannot_take() -> None:
    for prompt, num_new, said in (
        (torch.zeros(1, 0), 1, "the prompt is empty"),
        (torch.tensor([[3, 10]]), 1, "token 10 is outside the vocabulary of 10"),
        (PROMPT, 6, "3 prompt tokens and 6 new ones exceed the model's 8 positions"),
    ):
        with pytest.raises(BadInput, match=said):
            next(stream(Listed([5]), prompt, Sampling(num_new)))
    assert ids(stream(Listed([5]), torch.tensor([[9, 3, 1]]), Sampling(5))) == [5]


def test_a_model_without_a_number_of_positions_takes_any() -> None:
    model = Listed()
    for config in (SimpleNamespace(), SimpleNamespace(max_position_embeddings=None)):
        model.config = config
        check_tokens(model, highest=9, length=10**9, what="they")
    model.config = SimpleNamespace(max_position_embeddings=1)
    check_tokens(model, highest=0, length=1, what="they")
    with pytest.raises(BadInput, match="they exceed the model's 1 positions"):
        check_tokens(model, highest=0, length=2, what="they")
