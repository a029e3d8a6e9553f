"""Answers of a server to OpenAI's own client, metrics for Prometheus, and switches of the
preset."""

import json
import threading
import time

import httpx2
import pytest
import torch
from openai import OpenAI

from moectl.serving.answers import AnswerFormat
from moectl.serving.jobs import Done
from runtime.model.open import MoeModel
from runtime.session.generation.sampling import Sampling
from runtime.session.replies.pieces import TextPiece
from runtime.session.session import Session, Settings
from tests.helpers.serving import EXACT, SETTINGS, Running, idle, rest

pytestmark = pytest.mark.slow

PROMPTS = (
    "It was a dark and stormy night;",
    "sheep",
    "An old dog by the gate and",
    "Return the number of",
    "x = 1",
)


def alone(session: Session, prompt: str, num_tokens: int, **sampling: float) -> list[int]:
    drawn = Sampling(max_new_tokens=num_tokens, ignore_eos=True, **sampling)
    return [token.token_id for token in session.tokens(session.encode(prompt), drawn)]


def test_streams_in_company_are_runs_by_themselves(
    server: Running, client: OpenAI, opened: MoeModel
) -> None:
    """One client disconnects during its answer, one while it waits; the others are not affected."""
    with Session(opened, SETTINGS) as session:
        expected = [alone(session, prompt, 24) for prompt in PROMPTS]
        texts = [opened.tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
    before = server.scheduler.tally.read()["requests"]
    streams = [
        client.completions.create(prompt=prompt, max_tokens=24, stream=True, **EXACT)
        for prompt in PROMPTS
    ]
    next(iter(streams[1]))
    streams[1].close()
    streams[4].close()
    for number in (0, 2, 3):
        text, took = rest(streams[number])
        assert (took["token_ids"], text) == (expected[number], texts[number])
    idle(server)
    after = server.scheduler.tally.read()["requests"]
    assert {name: after[name] - before[name] for name in after} == {
        "answered": 3,
        "left": 2,
        "failed": 0,
        "refused": 0,
    }


def test_one_request_counts_as_a_run_does(
    client: OpenAI, web: httpx2.Client, opened: MoeModel
) -> None:
    assert web.post("/preset", json={"preset": "specmd"}).json() == {
        "preset": "specmd"
    }  # the fast tier is empty
    answer = client.completions.create(prompt=PROMPTS[0], max_tokens=8, **EXACT)
    with Session(opened, Settings(preset="specmd", budget="25%", threads=1)) as session:
        assert answer.moectl["token_ids"] == alone(session, PROMPTS[0], 8)
        counted = session.controller.counters
        exposed_ms = answer.moectl["counters"].pop("exposed_ms")
        assert (answer.moectl["counters"], answer.moectl["by_layer"]) == (
            counted.totals(),
            counted.by_layer(),
        )
    assert 0 <= exposed_ms < answer.moectl["ttft_ms"] + 8 * answer.moectl["tpot_ms"]
    assert web.post("/preset", json={"preset": "on-demand"}).status_code == 200


def test_an_event_is_one_line_however_lines_are_split() -> None:
    """Clients that split as Python does would cut the JSON at U+2028."""
    text = "a\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r\nb"
    form = AnswerFormat(True, f"tiny{text}", 3, has_usage=True, has_counters=True)
    done = Done("stop", 1, {"preset": text})
    events = [
        *form.begins(),
        form.goes_on(0, TextPiece(text)),
        form.ends(0, done),
        *form.closes([done]),
    ]
    for told in events:
        [line, empty] = told.splitlines()
        assert told.endswith("\n\n") and line.startswith("data: ") and not empty
    assert json.loads(events[1].removeprefix("data: "))["choices"][0]["delta"]["content"] == text


def test_a_chat(client: OpenAI, opened: MoeModel) -> None:
    turns = [{"role": "user", "content": "sheep"}, {"role": "assistant", "content": "dog"}]
    turns.append(
        {
            "role": "user",
            "content": [{"type": "text", "text": "old "}, {"type": "text", "text": "gate"}],
        }
    )
    with Session(opened, SETTINGS) as session:
        expected = alone(session, "sheep\n\ndog\n\nold gate\n\n", 6)
    answer = client.chat.completions.create(messages=turns, max_completion_tokens=6, **EXACT)
    [choice] = answer.choices
    assert answer.moectl["token_ids"] == expected and choice.finish_reason == "length"
    assert choice.message.content == opened.tokenizer.decode(expected, skip_special_tokens=True)
    asked = {
        "messages": turns,
        "max_tokens": 6,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, last = client.chat.completions.create(**asked, **EXACT)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    )
    assert (
        chunks[0].choices[0].delta.role == "assistant"
        and chunks[-1].choices[0].finish_reason == "length"
    )
    assert (
        last.choices == [] and last.usage == answer.usage and last.moectl["token_ids"] == expected
    )
    assert (
        answer.usage.completion_tokens == 6
        and answer.usage.total_tokens == answer.usage.prompt_tokens + 6
    )
    assert (
        [model.id for model in client.models.list()]
        == [client.models.retrieve("tiny").id]
        == ["tiny"]
    )


def test_whoever_hangs_up_frees_the_row(
    server: Running, client: OpenAI, web: httpx2.Client
) -> None:
    """Also before the first text, streamed or whole, running or waiting."""
    turns = [{"role": "user", "content": "sheep"}]
    asked = {
        "model": "tiny",
        "messages": turns,
        "max_tokens": 200,
        "temperature": 0,
        "ignore_eos": True,
    }
    end = time.monotonic() + 10
    expected = server.scheduler.tally.read()["requests"]["left"] + 5
    streams = [
        client.chat.completions.create(messages=turns, max_tokens=200, stream=True, **EXACT)
        for _ in range(4)
    ]
    with pytest.raises(httpx2.TimeoutException):
        web.post("/v1/chat/completions", json=asked, timeout=0.05)
    for stream in streams:
        stream.close()
    while server.scheduler.tally.read()["requests"]["left"] < expected:
        assert time.monotonic() < end
        time.sleep(0.01)
    idle(server)


def test_a_client_may_leave_before_its_prompt_is_encoded(
    server: Running, web: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt is being encoded, one waits for that; the server answers others meanwhile."""
    session = server.scheduler.session
    go = threading.Event()
    encoded = []
    encode = session.prompts.encode

    def wait(prompt: str) -> torch.Tensor:
        encoded.append(prompt)
        assert go.wait(10)
        return encode(prompt)

    monkeypatch.setattr(session.prompts, "encode", wait)
    left = server.scheduler.tally.read()["requests"]["left"]
    for prompt in ("sheep", "dog"):
        with pytest.raises(httpx2.TimeoutException):
            web.post("/v1/completions", json={"model": "tiny", "prompt": prompt}, timeout=0.1)
    assert (
        web.get("/health").json() == {"status": "ok"}
        and "moectl_requests_waiting" in web.get("/metrics").text
    )
    idle(server)
    go.set()
    assert encoded == ["sheep"] and server.scheduler.tally.read()["requests"]["left"] == left + 2


def test_a_seed_draws_the_same_in_company(client: OpenAI, opened: MoeModel) -> None:
    with Session(opened, SETTINGS) as session:
        expected = alone(session, "sheep", 12, temperature=1.0, top_k=0, seed=7)
    asked = EXACT | {"prompt": "sheep", "max_tokens": 12, "stream": True, "temperature": 1.0}
    streams = [client.completions.create(**asked, seed=seed) for seed in (7, 8, 7)]
    first, other, again = (rest(stream)[1]["token_ids"] for stream in streams)
    assert first == again == expected != other


def test_an_answer_ends_at_a_stop(client: OpenAI) -> None:
    asked = EXACT | {"prompt": "sheep", "max_tokens": 24}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[10:13]
    expected = whole[: whole.index(stop)]
    answer = client.completions.create(**asked, stop=["not in it", stop])
    assert answer.choices[0].text == expected and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 24
    assert rest(client.completions.create(**asked, stop=stop, stream=True))[0] == expected


def test_prometheus_hears_what_clients_were_told(client: OpenAI, web: httpx2.Client) -> None:
    def read() -> dict[str, float]:
        lines = [line for line in web.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    before = read()
    took = client.completions.create(prompt="sheep", max_tokens=5, **EXACT).moectl
    after = read()
    assert after["moectl_generated_tokens_total"] - before["moectl_generated_tokens_total"] == 5
    answered = 'moectl_requests_total{outcome="answered"}'
    assert after[answered] - before[answered] == 1 and after["moectl_requests_running"] == 0
    for layer, counts in enumerate(took["by_layer"]):
        for name, count in counts.items():
            metric = f'moectl_expert_{name}_total{{layer="{layer}"}}'
            assert after[metric] - before[metric] == count
    assert 'moectl_info{device="cpu",model="tiny",preset="on-demand"}' in after
    for name, count in (("to_first_token", 1), ("per_output_token", 4)):
        times = f"moectl_time_{name}_seconds"
        assert after[f"{times}_count"] - before[f"{times}_count"] == count
        assert after[f'{times}_bucket{{le="+Inf"}}'] == after[f"{times}_count"]
        assert after[f"{times}_sum"] > before[f"{times}_sum"]


def test_a_preset_is_switched_between_requests(
    server: Running, client: OpenAI, web: httpx2.Client
) -> None:
    expected = client.completions.create(prompt="sheep", max_tokens=60, **EXACT).moectl["token_ids"]
    stream = client.completions.create(prompt="sheep", max_tokens=60, stream=True, **EXACT)
    next(iter(stream))
    switched = web.post("/preset", json={"preset": "near"}, timeout=30)
    took = rest(stream)[1]  # it arrived first
    assert switched.json() == {"preset": "near"} and web.get("/live").json()["preset"] == "near"
    assert (took["preset"], took["token_ids"]) == ("on-demand", expected)
    answer = client.completions.create(prompt="sheep", max_tokens=60, **EXACT).moectl
    assert answer["token_ids"] == expected and answer["counters"]["near"] > 0
    lacking = web.post("/preset", json={"preset": "buddymoe"})
    assert (
        lacking.status_code == 400 and "moectl build-buddies" in lacking.json()["error"]["message"]
    )
    assert web.post("/preset", json={"preset": "nearest"}).status_code == 404
    assert (
        client.completions.create(prompt="sheep", max_tokens=60, **EXACT).moectl["preset"] == "near"
    )
    assert web.post("/preset", json={"preset": "on-demand"}).status_code == 200


def test_who_places_experts_by_the_prompt_takes_one_at_a_time(
    server: Running, client: OpenAI, web: httpx2.Client
) -> None:
    for preset, are_mixed in (("monde-static", False), ("on-demand", True)):
        web.post("/preset", json={"preset": preset})
        passes: list[int] = []
        server.scheduler.session.watcher.on_pass = lambda requests, told=passes.append: told(
            int(requests[0])
        )
        streams = [
            client.completions.create(prompt="sheep", max_tokens=40, stream=True, **EXACT)
            for _ in range(2)
        ]
        for stream in streams:
            rest(stream)
        assert len(passes) == 80 and (passes != sorted(passes)) == are_mixed


def test_the_fields_of_bodies_are_told(web: httpx2.Client) -> None:
    paths = web.get("/openapi.json").json()["paths"]
    for path, name in (
        ("/v1/chat/completions", "messages"),
        ("/v1/completions", "prompt"),
        ("/preset", "preset"),
    ):
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert name in body["required"] and name in body["properties"]
