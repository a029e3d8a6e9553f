"""A server whose requests share passes of the model: its answers are those of runs by themselves,
in float32."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import numpy as np
import openai
import pytest
import torch
from openai import OpenAI
from transformers import LogitsProcessor

from moectl.serving.guard import ServerLimits
from runtime.model.open import MoeModel, open_model
from runtime.session.generation import sampling as sampling_module
from runtime.session.session import Session
from tests.conftest import Checkpoint
from tests.helpers.serving import EXACT, SETTINGS, Running, idle, rest, serving
from tests.moectl.serving.test_answers import PROMPTS, alone

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    store = tmp_path_factory.mktemp("serve") / "moe.duckdb"
    limits = ServerLimits(num_rows=4, num_waiting=8, shares_passes=True)
    with serving(open_model(str(checkpoint("olmoe"))), SETTINGS, limits, store) as running:
        yield running


def test_many_requests_of_several_clients_are_runs_by_themselves(
    client: OpenAI, opened: MoeModel
) -> None:
    asked = [
        (f"{PROMPTS[number % 5]} {number}", 4 + number % 9, number % 3) for number in range(24)
    ]
    with Session(opened, SETTINGS) as session:
        drawn = [
            {"temperature": 0.9, "top_k": 0, "seed": number} if kind == 1 else {}
            for number, (*_, kind) in enumerate(asked)
        ]
        expected = [
            alone(session, prompt, n, **options)
            for (prompt, n, _), options in zip(asked, drawn, strict=True)
        ]

    def ask(number: int) -> list[int]:
        prompt, num_tokens, kind = asked[number]
        own = EXACT | ({"temperature": 0.9, "seed": number} if kind == 1 else {})
        if kind == 2:
            return rest(
                client.completions.create(prompt=prompt, max_tokens=num_tokens, stream=True, **own)
            )[1]["token_ids"]
        return client.completions.create(prompt=prompt, max_tokens=num_tokens, **own).moectl[
            "token_ids"
        ]

    with ThreadPoolExecutor(5) as clients:
        assert list(clients.map(ask, range(len(asked)))) == expected


def test_whoever_leaves_changes_no_other_answer(
    server: Running, client: OpenAI, opened: MoeModel
) -> None:
    with Session(opened, SETTINGS) as session:
        expected = [alone(session, prompt, 24) for prompt in PROMPTS]
    before = server.scheduler.tally.read()["requests"]
    streams = [
        client.completions.create(prompt=prompt, max_tokens=24, stream=True, **EXACT)
        for prompt in PROMPTS
    ]
    next(iter(streams[1]))
    streams[1].close()
    streams[4].close()
    for number in (0, 2, 3):
        assert rest(streams[number])[1]["token_ids"] == expected[number]
    idle(server)
    after = server.scheduler.tally.read()["requests"]
    assert {name: after[name] - before[name] for name in after} == {
        "answered": 3,
        "left": 2,
        "failed": 0,
        "refused": 0,
    }


def test_an_answer_ends_at_a_stop(client: OpenAI) -> None:
    asked = EXACT | {"prompt": "sheep", "max_tokens": 24}
    whole = client.completions.create(**asked).choices[0].text
    answer = client.completions.create(**asked, stop=whole[10:13])
    assert (
        answer.choices[0].text == whole[: whole.index(whole[10:13])]
        and answer.choices[0].finish_reason == "stop"
    )


def test_equal_beginnings_are_told(client: OpenAI, web: httpx2.Client) -> None:
    """The second prompt ends otherwise than the first."""
    system = list(range(3, 43))
    before = web.get("/live").json()
    used = [
        client.completions.create(
            prompt=[*system, last], max_tokens=2, **EXACT
        ).usage.prompt_tokens_details
        for last in (50, 51)
    ]
    assert [one.cached_tokens for one in used] == [0, 40]
    metrics = web.get("/metrics").text
    assert f"moectl_cached_tokens_total {before['cached_tokens'] + 40}" in metrics
    reused = before["kept_prompts"]["num_reused"] + 1
    assert f"moectl_reused_prompts_total {reused}" in metrics
    live = web.get("/live").json()
    requests = live["receipt"]["requests"]
    assert live["kept_prompts"]["most_nbytes"] == requests["kept_prompts_bytes"] > 0
    assert requests["rows"] == 4 and requests["cache_room_bytes"] > requests["kept_prompts_bytes"]


def test_what_users_were_charged_adds_up(
    server: Running, client: OpenAI, web: httpx2.Client
) -> None:
    def read() -> dict:
        return web.get("/live").json()

    before = read()
    with ThreadPoolExecutor(4) as clients:
        asked = [
            {"prompt": prompt, "max_tokens": 9, "user": f"u{number % 2}"}
            for number, prompt in enumerate(PROMPTS)
        ]
        answers = [
            one.moectl
            for one in clients.map(lambda one: client.completions.create(**one, **EXACT), asked)
        ]
    took = [one["counters"] for one in answers]
    after = read()
    for name in ("requests", "hits", "misses", "fetched", "demand_bytes", "evictions"):
        assert sum(one[name] for one in took) == pytest.approx(
            after["counters"][name] - before["counters"][name]
        )
    shares = sum(one["passes"] * one["share_of_passes"] for one in answers)
    assert shares == pytest.approx(after["passes"] - before["passes"])
    assert min(one["share_of_passes"] for one in answers) < 1
    assert re.fullmatch(
        r"9 tokens, \d+\.\d tokens/s, first \d.* m?s; hits \d+%; stall \d.* m?s; \S+ of 9 passes",
        answers[0]["line"],
    )
    owners = after["owners"]
    assert [owners[name]["generated_tokens"] for name in ("u0", "u1")] == [27, 18]
    assert sum(one["counters"]["demand_bytes"] for one in owners.values()) == pytest.approx(
        after["counters"]["demand_bytes"]
    )
    assert 'moectl_user_generated_tokens_total{user="u0"} 27' in web.get("/metrics").text
    experts = [len(one["hit"]) + len(one["missed"]) for one in after["last_token"]]
    assert all(server.scheduler.session.opened.shape.top_k <= count for count in experts)


def test_the_error_of_one_request_ends_no_other(
    client: OpenAI,
    opened: MoeModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise ValueError("broken")

    rules = sampling_module._rules

    def break_drawn(model: object, prompt: torch.Tensor, sampling: object, *own: object) -> tuple:
        processors, *others = rules(model, prompt, sampling, *own)
        if sampling.temperature:
            processors.append(Broken())
        return processors, *others

    monkeypatch.setattr(sampling_module, "_rules", break_drawn)
    with Session(opened, SETTINGS) as session:
        expected = alone(session, "sheep", 30)
    stream = client.completions.create(prompt="sheep", max_tokens=30, stream=True, **EXACT)
    next(iter(stream))
    with pytest.raises(openai.InternalServerError, match="internal error: ValueError"):
        client.completions.create(prompt="dog", **(EXACT | {"temperature": 1.0}))
    assert rest(stream)[1]["token_ids"] == expected
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError]


def test_a_preset_is_switched_between_requests(client: OpenAI, web: httpx2.Client) -> None:
    stream = client.completions.create(prompt="sheep", max_tokens=40, stream=True, **EXACT)
    next(iter(stream))
    assert web.post("/preset", json={"preset": "specmd"}, timeout=30).json() == {"preset": "specmd"}
    expected = rest(stream)[1]
    answer = client.completions.create(prompt="sheep", max_tokens=40, **EXACT).moectl
    assert (expected["preset"], answer["preset"]) == ("on-demand", "specmd")
    assert answer["token_ids"] == expected["token_ids"]
    assert web.post("/preset", json={"preset": "on-demand"}).status_code == 200


def test_costs_by_token_add_up(client: OpenAI) -> None:
    """In whole answers and in streams, which tell the text of a token before its cost."""
    own = EXACT | {"extra_body": {"ignore_eos": True, "counters": "by_token"}}

    def ask(number: int) -> tuple[list[dict], dict]:
        asked = {"prompt": PROMPTS[number], "max_tokens": 6, **own}
        if number % 2:
            took = client.completions.create(**asked).moectl
            return took.pop("by_token"), took
        told = [
            one.moectl for one in client.completions.create(**asked, stream=True) if one.model_extra
        ]
        return [each["token"] for each in told[:-1]], told[-1]

    with ThreadPoolExecutor(3) as clients:
        for tokens, took in clients.map(ask, range(3)):
            assert [token["token_id"] for token in tokens] == took["token_ids"]
            for kind in ("hits", "late", "misses"):
                by_layer = np.sum([token[kind] for token in tokens], axis=0)
                assert by_layer == pytest.approx([one[kind] for one in took["by_layer"]], abs=0.01)
            stall_ms = sum(token["stall_ms"] for token in tokens)
            assert stall_ms == pytest.approx(took["counters"]["exposed_ms"], abs=0.01)
