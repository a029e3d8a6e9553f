"""Requests that a server refuses: invalid ones, clients without the key, and a full queue."""

import json
import time

import httpx2
import openai
import pytest
from openai import OpenAI
from starlette.testclient import TestClient

from moectl.serving.app import Serving, application
from runtime.session.prompts.encoder import TextBound
from tests.helpers.serving import EXACT, Running, idle


@pytest.mark.parametrize(
    ("asked", "status", "told"),
    [
        ({"model": "gpt-5"}, 404, "there is no model 'gpt-5' here, only 'tiny'"),
        ({"prompt": "a " * 400}, 400, "exceed the model's"),
        (
            {"prompt": "a " * 400, "stream": True},
            400,
            "exceed the model's",
        ),  # before the first event
        ({"prompt": [9, 999_999]}, 400, "outside the vocabulary"),
        ({"prompt": [9, -1]}, 400, "prompt: a text or a list of token ids"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": ["one", ""]}, 400, "the prompt is empty"),
        ({"prompt": None}, 400, "prompt: a text or a list"),
        ({"max_tokens": 201}, 400, "at most 200 tokens, not 201"),
        ({"max_tokens": 0}, 400, "max_tokens: Input should be greater than or equal to 1"),
        ({"temperature": 2.5}, 400, "temperature: Input should be less than or equal to 2"),
        ({"temperature": "hot"}, 400, "temperature: Input should be a valid number"),
        ({"top_p": 0}, 400, "top_p: Input should be greater than 0"),
        ({"seed": 2**64}, 400, "seed: "),
        ({"n": 0}, 400, "n: Input should be greater than or equal to 1"),
        ({"n": 7}, 400, "7 answers are more than the 6 that are held here"),
        ({"logprobs": 6}, 400, "logprobs: Input should be less than or equal to 5"),
        ({"logprobs": 1, "echo": True}, 400, "echo: log probabilities of a prompt"),
        ({"stop": ["a"] * 17}, 400, "stop: one text or up to 16"),
        ({"stop": ""}, 400, "stop: one text or up to 16"),
        ({"logit_bias": {"the": 1}}, 400, "logit_bias: token ids with numbers from -100"),
        ({"logit_bias": {"96": 1}}, 400, "logit_bias has token 96, the vocabulary 0 to 95"),
        ({"min_p": 2}, 400, "min_p: Input should be less than or equal to 1"),
        ({"grammar": "start: x"}, 400, "the grammar cannot be used"),
        ({"grammar": "start: x", "regex": "a"}, 400, "exclude each other: give one"),
        ({"response_format": {"type": "xml"}}, 400, "response_format: Input tag 'xml'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 1}}},
            400,
            "response_format.json_schema.json_schema.schema: Input should be a valid dictionary",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "strin"}},
                },
                "stream": True,
            },
            400,
            "the JSON schema cannot be used: Invalid type: strin",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused(web: httpx2.Client, asked: dict, status: int, told: str) -> None:
    answer = web.post(
        "/v1/completions", json={"model": "tiny", "prompt": "sheep", "max_tokens": 2} | asked
    )
    error = answer.json()["error"]
    assert answer.status_code == status and told in error["message"]
    assert (
        error.keys() == {"message", "type", "param", "code"}
        and error["type"] == "invalid_request_error"
    )


def test_what_is_unknown_is_named_or_refused(server: Running, web: httpx2.Client) -> None:
    asked = {"prompt": "sheep", "max_tokens": 1, "temprature": 0.3, "a, \n\u00e9": 1}
    turn = {"role": "user", "content": "sheep", "mood": "good"}
    for path, more, told in (
        ("completions", asked, "temprature, a%2C%20%0A%C3%A9"),
        ("completions", asked | {"stream": True}, "temprature, a%2C%20%0A%C3%A9"),
        ("chat/completions", {"max_tokens": 1, "messages": [turn, turn]}, "messages.mood"),
        ("completions", {"prompt": "", "x": 1}, None),  # refused for another reason
        ("completions", {"prompt": "sheep", "max_tokens": 1, "model": ""}, None),
    ):
        answer = web.post(f"/v1/{path}", json=more)
        assert answer.status_code == (400 if more.get("prompt") == "" else 200)
        assert answer.headers.get("x-moectl-ignored") == told
    strict = application(Serving(server.scheduler, "tiny", {}, is_strict=True))
    with TestClient(strict) as client:
        refused = client.post("/v1/completions", json=asked).json()["error"]
    assert refused["message"] == (
        "temprature: there is no such option: did you mean temperature?"
    ) and (refused["param"] == "temprature")


def test_what_cannot_fit_is_refused_before_it_is_queued(
    server: Running, web: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        server.scheduler.session.prompts.__dict__, "_bound", TextBound(4096, drops_spaces=False)
    )
    monkeypatch.setattr(server.scheduler, "submit", lambda job: pytest.fail("it was queued"))
    for prompt, told in (
        ("a" * 4097, "4097 characters of prompt exceed"),
        ([9] * 4097, "4097 prompt tokens exceed"),
    ):
        answer = web.post("/v1/completions", json={"model": "tiny", "prompt": prompt})
        error = answer.json()["error"]
        assert (
            answer.status_code == 400
            and told in error["message"]
            and error["code"] == "context_length_exceeded"
        )


def test_who_is_refused(server: Running, web: httpx2.Client) -> None:
    with pytest.raises(openai.AuthenticationError, match="the API key is wrong"):
        server.client("guess").models.list()
    assert (
        httpx2.get(f"{server.url}/metrics").status_code == 401
        and httpx2.get(f"{server.url}/live").status_code == 401
    )
    assert httpx2.get(f"{server.url}/health").json() == {"status": "ok"}
    assert web.get("/v1/models", headers={"Host": "elsewhere.example:80"}).status_code == 403
    json_only = {"Content-Type": "application/json"}
    asked = json.dumps({"model": "tiny", "prompt": "sheep"})
    for content, headers, status in (
        ("{'model': 1", json_only, 400),
        ("[]", json_only, 400),
        (asked, {"Content-Type": "text/plain"}, 400),  # as an HTML form of another site sends it
        (asked.replace("sheep", "\\ud83d"), json_only, 400),
        ("x" * 30_000, json_only, 413),
        ((b"x" * 1000 for _ in range(30)), json_only, 413),
    ):
        answer = web.post("/v1/completions", content=content, headers=headers)
        assert (answer.status_code, answer.json().keys()) == (status, {"error"})
    assert web.get("/v1/engines").json()["error"]["message"] == "GET /v1/engines: Not Found"


def test_half_a_character_is_refused_wherever_it_is(web: httpx2.Client) -> None:
    """No counter, page or answer could repeat it; a name of the server's own is escaped where it
    has one."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    half = "cut \ud83d"
    bodies = [
        chat | {"user": half},
        chat | {"model": half},
        chat | {half: 1},
        chat | {"metadata": {half: "a"}},
    ]
    bodies += [
        chat | {"messages": [{"role": "user", "content": "a", name: half}]}
        for name in ("content", "name", "x")
    ]
    web.headers["Content-Type"] = "application/json"
    for body in bodies:
        answer = web.post("/v1/chat/completions", content=json.dumps(body))
        assert answer.status_code == 400 and "half a character" in answer.json()["error"]["message"]
    assert [web.get(path).status_code for path in ("/live", "/metrics", "/")] == [200, 200, 200]


def test_names_that_break_lines_break_no_counter(
    server: Running, client: OpenAI, web: httpx2.Client
) -> None:
    """Also one that reached the counters on another way."""
    client.completions.create(
        **EXACT | {"prompt": "sheep", "max_tokens": 1}, user='a"\\\n\r\u2028\x85b'
    )
    server.scheduler.tally.first("cut \ud83d", 1, 0.1)
    try:
        metrics = web.get("/metrics")
        live = web.get("/live")
    finally:
        del server.scheduler.tally.owners["cut \ud83d"]
    assert (metrics.status_code, live.status_code) == (200, 200)
    lines = metrics.text.splitlines()
    assert (
        'moectl_user_generated_tokens_total{user="a\\"\\\\\\\\n\\\\r\\\\u2028\\\\x85b"} 1.0'
        in lines
    )
    assert 'moectl_user_first_tokens_total{user="cut \\\\ud83d"} 1.0' in lines
    assert all(line.startswith(("#", "moectl_", "process_")) for line in lines)
    assert json.loads(live.text)["owners"].keys() >= {'a"\\\n\r\u2028\x85b', "cut \ud83d"}


def test_a_full_queue_says_so(server: Running, client: OpenAI) -> None:
    asked = EXACT | {"prompt": "sheep", "max_tokens": 200, "stream": True}
    streams = [client.completions.create(**asked) for _ in range(6)]
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(**asked)
    assert (
        refused.value.response.headers["Retry-After"] == "1" and refused.value.code == "queue_full"
    )
    streams[5].close()  # a waiting one
    while server.scheduler.num_waiting > 2:
        time.sleep(0.01)
    streams[5] = client.completions.create(**asked)
    for stream in streams:
        stream.close()
    idle(server)
