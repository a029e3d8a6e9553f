"""A server as its clients see it: OpenAI's own client, Prometheus and a browser."""

import asyncio
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from openai import OpenAI

from moectl.serving.guard import ServerLimits
from runtime.model.open import MoeModel, open_model
from runtime.session.generate import Sampling
from runtime.session.session import Session, Settings
from tests import ROOT
from tests.conftest import Checkpoint
from tests.helpers.browser import BROWSER, browsing
from tests.helpers.serving import EXACT, SETTINGS, Running, rest, serving

PROMPTS = ("It was a dark and stormy night;", "sheep", "An old dog by the gate and", "Return the number of", "x = 1")
LIMITS = ServerLimits(num_rows=3, num_waiting=3, max_tokens=200, body_nbytes=20_000)


@pytest.fixture(scope="module")
def opened(checkpoint: Checkpoint) -> MoeModel:
    return open_model(str(checkpoint("olmoe")))


@pytest.fixture(scope="module")
def server(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    store = tmp_path_factory.mktemp("serve") / "moe.duckdb"
    with serving(open_model(str(checkpoint("olmoe"))), SETTINGS, LIMITS, store) as running:
        yield running


@pytest.fixture
def client(server: Running) -> OpenAI:
    return server.client()


@pytest.fixture
def web(server: Running) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, headers={"Authorization": "Bearer secret"}) as client:
        yield client


def alone(session: Session, prompt: str, num_tokens: int, **sampling: float) -> list[int]:
    drawn = Sampling(max_new_tokens=num_tokens, ignore_eos=True, **sampling)
    return [token.token_id for token in session.generate(session.encode(prompt), drawn)]


def idle(server: Running) -> None:
    """Wait until nothing is under way; whoever has left is noticed within a token."""
    end = time.monotonic() + 10
    while server.scheduler.num_running + server.scheduler.num_waiting:
        assert time.monotonic() < end
        time.sleep(0.01)


# Answers


def test_streams_in_company_are_runs_by_themselves(server: Running, client: OpenAI, opened: MoeModel) -> None:
    """One client leaves in the midst of its answer, one while it waits; nobody else notices."""
    with Session(opened, SETTINGS) as session:
        expected = [alone(session, prompt, 24) for prompt in PROMPTS]
        texts = [opened.tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
    before = server.scheduler.tally.read()["requests"]
    streams = [client.completions.create(prompt=prompt, max_tokens=24, stream=True, **EXACT) for prompt in PROMPTS]
    next(iter(streams[1]))
    streams[1].close()
    streams[4].close()
    for number in (0, 2, 3):
        text, took = rest(streams[number])
        assert (took["token_ids"], text) == (expected[number], texts[number])
    idle(server)
    after = server.scheduler.tally.read()["requests"]
    assert {name: after[name] - before[name] for name in after} == {"answered": 3, "left": 2, "failed": 0, "refused": 0}
    assert not [thread for thread in threading.enumerate() if thread.name == "moectl-generate"]


def test_one_request_counts_as_a_run_does(client: OpenAI, web: httpx2.Client, opened: MoeModel) -> None:
    assert web.post("/preset", json={"preset": "specmd"}).json() == {"preset": "specmd"}  # with an empty tier
    answer = client.completions.create(prompt=PROMPTS[0], max_tokens=8, **EXACT)
    with Session(opened, Settings(preset="specmd", budget="25%", threads=1)) as session:
        assert answer.moectl["token_ids"] == alone(session, PROMPTS[0], 8)
        counted = session.controller.counters
        exposed_ms = answer.moectl["counters"].pop("exposed_ms")
        assert (answer.moectl["counters"], answer.moectl["by_layer"]) == (counted.totals(), counted.by_layer())
    assert 0 <= exposed_ms < answer.moectl["ttft_ms"] + 8 * answer.moectl["tpot_ms"]
    assert web.post("/preset", json={"preset": "on-demand"}).status_code == 200


def test_a_chat(client: OpenAI, opened: MoeModel) -> None:
    turns = [{"role": "user", "content": "sheep"}, {"role": "assistant", "content": "dog"}]
    turns.append({"role": "user", "content": [{"type": "text", "text": "old "}, {"type": "text", "text": "gate"}]})
    with Session(opened, SETTINGS) as session:
        expected = alone(session, "sheep\n\ndog\n\nold gate\n\n", 6)
    answer = client.chat.completions.create(messages=turns, max_completion_tokens=6, **EXACT)
    [choice] = answer.choices
    assert answer.moectl["token_ids"] == expected and choice.finish_reason == "length"
    assert choice.message.content == opened.tokenizer.decode(expected, skip_special_tokens=True)
    asked = {"messages": turns, "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**asked, **EXACT)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage == answer.usage and last.moectl["token_ids"] == expected
    assert answer.usage.completion_tokens == 6 and answer.usage.total_tokens == answer.usage.prompt_tokens + 6
    assert [model.id for model in client.models.list()] == [client.models.retrieve("tiny").id] == ["tiny"]


def test_whoever_hangs_up_frees_the_row(server: Running, client: OpenAI, web: httpx2.Client) -> None:
    """Also before a word of the answer, streamed or whole, under way or waiting."""
    turns = [{"role": "user", "content": "sheep"}]
    asked = {"model": "tiny", "messages": turns, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    end, expected = time.monotonic() + 10, server.scheduler.tally.read()["requests"]["left"] + 5
    streams = [client.chat.completions.create(messages=turns, max_tokens=200, stream=True, **EXACT) for _ in range(4)]
    with pytest.raises(httpx2.TimeoutException):
        web.post("/v1/chat/completions", json=asked, timeout=0.05)
    for stream in streams:
        stream.close()
    while server.scheduler.tally.read()["requests"]["left"] < expected:
        assert time.monotonic() < end
        time.sleep(0.01)
    idle(server)


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


# Refusals


@pytest.mark.parametrize(
    ("asked", "status", "told"),
    [
        ({"model": "gpt-5"}, 404, "there is no model 'gpt-5' here, only 'tiny'"),
        ({"prompt": "a " * 400}, 400, "exceed the model's"),
        ({"prompt": [9, 999_999]}, 400, "outside the vocabulary"),
        ({"prompt": [9, -1]}, 400, "prompt: one text or one list of token ids"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": ["one", "two"]}, 400, "send several prompts side by side"),
        ({"prompt": None}, 400, "prompt: one text"),
        ({"max_tokens": 201}, 400, "at most 200 tokens, not 201"),
        ({"max_tokens": 0}, 400, "max_tokens: Input should be greater than or equal to 1"),
        ({"temperature": 2.5}, 400, "temperature: Input should be less than or equal to 2"),
        ({"temperature": "hot"}, 400, "temperature: Input should be a valid number"),
        ({"top_p": 0}, 400, "top_p: Input should be greater than 0"),
        ({"seed": 2**64}, 400, "seed: "),
        ({"n": 2}, 400, "n can only be 1 here"),
        ({"logprobs": 3}, 400, "logprobs can only be False here"),
        ({"stop": ["a"] * 5}, 400, "stop: one text or up to four"),
        ({"stop": ""}, 400, "stop: one text or up to four"),
        ({"temprature": 0.3}, 400, "temprature: Extra inputs are not permitted"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused(web: httpx2.Client, asked: dict, status: int, told: str) -> None:
    answer = web.post("/v1/completions", json={"model": "tiny", "prompt": "sheep", "max_tokens": 2} | asked)
    error = answer.json()["error"]
    assert answer.status_code == status and told in error["message"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"


def test_who_is_refused(server: Running, web: httpx2.Client) -> None:
    with pytest.raises(openai.AuthenticationError, match="the API key is wrong"):
        server.client("guess").models.list()
    assert (
        httpx2.get(f"{server.url}/metrics").status_code == 401 and httpx2.get(f"{server.url}/live").status_code == 401
    )
    assert httpx2.get(f"{server.url}/health").json() == {"status": "ok"}
    assert web.get("/v1/models", headers={"Host": "elsewhere.example:80"}).status_code == 403
    json_only = {"Content-Type": "application/json"}
    asked = json.dumps({"model": "tiny", "prompt": "sheep"})
    for content, headers, status in (
        ("{'model': 1", json_only, 400),
        ("[]", json_only, 400),
        (asked, {"Content-Type": "text/plain"}, 400),  # as a form on somebody's web page would send it
        ("x" * 30_000, json_only, 413),
        ((b"x" * 1000 for _ in range(30)), json_only, 413),
    ):
        answer = web.post("/v1/completions", content=content, headers=headers)
        assert (answer.status_code, answer.json().keys()) == (status, {"error"})
    assert web.get("/v1/engines").json()["error"]["message"] == "GET /v1/engines: Not Found"


def test_a_full_queue_says_so(server: Running, client: OpenAI) -> None:
    asked = EXACT | {"prompt": "sheep", "max_tokens": 200, "stream": True}
    streams = [client.completions.create(**asked) for _ in range(6)]
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(**asked)
    assert refused.value.response.headers["Retry-After"] == "1" and refused.value.code == "queue_full"
    streams[5].close()  # one that waits
    while server.scheduler.num_waiting > 2:
        time.sleep(0.01)
    streams[5] = client.completions.create(**asked)
    for stream in streams:
        stream.close()
    idle(server)


# Looking on


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
    assert 'moectl_info{model="tiny",preset="on-demand",device="cpu"}' in after


def test_a_preset_is_switched_between_requests(server: Running, client: OpenAI, web: httpx2.Client) -> None:
    expected = client.completions.create(prompt="sheep", max_tokens=60, **EXACT).moectl["token_ids"]
    stream = client.completions.create(prompt="sheep", max_tokens=60, stream=True, **EXACT)
    next(iter(stream))
    switched = web.post("/preset", json={"preset": "near"}, timeout=30)
    took = rest(stream)[1]  # it was there first
    assert switched.json() == {"preset": "near"} and web.get("/live").json()["preset"] == "near"
    assert (took["preset"], took["token_ids"]) == ("on-demand", expected)
    answer = client.completions.create(prompt="sheep", max_tokens=60, **EXACT).moectl
    assert answer["token_ids"] == expected and answer["counters"]["near"] > 0
    lacking = web.post("/preset", json={"preset": "buddymoe"})
    assert lacking.status_code == 400 and "moectl build-buddies" in lacking.json()["error"]["message"]
    assert web.post("/preset", json={"preset": "nearest"}).status_code == 404
    assert client.completions.create(prompt="sheep", max_tokens=60, **EXACT).moectl["preset"] == "near"
    assert web.post("/preset", json={"preset": "on-demand"}).status_code == 200


def test_who_places_experts_by_the_prompt_takes_one_at_a_time(
    server: Running, client: OpenAI, web: httpx2.Client
) -> None:
    for preset, are_mixed in (("monde", False), ("on-demand", True)):
        web.post("/preset", json={"preset": preset})
        passes: list[int] = []
        server.scheduler.session.watcher.on_pass = lambda requests, told=passes.append: told(int(requests[0]))
        streams = [client.completions.create(prompt="sheep", max_tokens=40, stream=True, **EXACT) for _ in range(2)]
        for stream in streams:
            rest(stream)
        assert len(passes) == 80 and (passes != sorted(passes)) == are_mixed


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed")
def test_the_page_in_a_browser(server: Running, client: OpenAI, tmp_path: Path) -> None:
    """By keyboard alone: the key, another preset, what is in force; at two widths, with nothing from elsewhere."""
    asyncio.run(_look(server, client, tmp_path))


async def _look(server: Running, client: OpenAI, tmp_path: Path) -> None:
    async with browsing(tmp_path) as tab:
        await tab.open(f"{server.url}/", width=1200, height=900)
        await tab.until("document.getElementById('said').textContent.includes('wants an API key')")
        await tab.value("document.getElementById('key').focus()")
        await tab.call("Input.insertText", text="secret")
        await tab.press("Enter")
        await tab.until("document.getElementById('model').textContent === 'tiny'")
        said = [message for message in tab.said if "401" not in message]
        await asyncio.to_thread(client.completions.create, prompt="sheep", max_tokens=9, **EXACT)
        total = server.scheduler.tally.read()["generated_tokens"]
        await tab.until(f"document.getElementById('speed-more').textContent === '{total:,} so far'")
        await tab.until("document.getElementById('hits').textContent.endsWith('%')")
        assert await tab.value("document.querySelectorAll('#misses-chart rect').length") == 2
        held = await tab.value("document.getElementById('residency').getAttribute('aria-label')")
        assert sum(map(int, re.findall(r"(\d+) of 8 resident", held))) == server.scheduler.receipt["slots"] == 4
        for width in (1200, 360):
            await tab.size(width, 900)
            assert await tab.value("document.documentElement.scrollWidth") <= width
            await tab.picture(tmp_path / f"{width}.png")
        await tab.value("document.getElementById('preset').focus()")
        reached = []
        for _ in range(2):
            await tab.press("Tab")
            reached.append(await tab.value("document.activeElement.textContent"))
        assert reached == ["Switch", "What is in force"]
        await tab.press("Enter")
        assert await tab.value("document.querySelector('details').open")
        await tab.value("document.getElementById('preset').value = 'near'")
        await tab.value("document.querySelector('#switch button').focus()")
        await tab.press("Enter")
        await tab.until("document.getElementById('said').textContent === 'near is in force.'")
        await tab.until("document.getElementById('about').textContent.includes(' near,')")
        assert server.scheduler.preset == "near"
        server.scheduler.switch("on-demand").settled.result()
        assert not said and {url.removeprefix(server.url) for url in tab.asked} == {"/", "/live", "/preset"}


def test_the_page_of_the_documents_is_true(server: Running, client: OpenAI, capfd: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "serve.md").read_text()
    for old, new in ((":8000", f":{server.url.rpartition(':')[2]}"), ('"demo"', '"tiny"'), ("any", "secret")):
        page = page.replace(old, new)
    [program], [commands] = (re.findall(rf"```{name}\n(.*?)```", page, re.DOTALL) for name in ("python", "bash"))
    answer = client.completions.create(prompt=PROMPTS[3], max_tokens=16, model="tiny", temperature=0)
    capfd.readouterr()
    exec(program, {})
    text, _, hits = capfd.readouterr().out.rpartition(answer.choices[0].text)
    assert text == "" and int(hits) > 0
    chat, metrics = (subprocess.run(line, shell=True, capture_output=True).stdout for line in commands.splitlines())
    assert json.loads(chat)["usage"]["completion_tokens"] <= 8 and b"moectl_expert_hits_total" in metrics
