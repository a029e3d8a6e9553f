"""A server that drafts: answers in shared passes are the undrafted ones, and each client is told of
its own drafts."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx2
import openai
import pytest
from openai import OpenAI

from moectl.serving.guard import ServerLimits
from runtime.model.open import MoeModel, open_model
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session
from tests.conftest import Checkpoint
from tests.helpers.serving import EXACT, SETTINGS, Running, serving

PROMPTS = ["a b a b a b a", "sheep sheep sheep", "x = 1; x = 1; x =", "one two one two one"]
TOKENS = 16


@pytest.fixture(scope="module", params=[True, False], ids=["shared", "in turns"])
def server(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    store = tmp_path_factory.mktemp("serve") / "moe.duckdb"
    limits = ServerLimits(num_rows=3, num_waiting=8, shares_passes=request.param)
    settings = replace(SETTINGS, draft="ngram=1:4")
    with serving(open_model(str(checkpoint("olmoe"))), settings, limits, store) as running:
        yield running


@pytest.fixture(scope="module")
def expected(opened: MoeModel) -> list[list[int]]:
    with Session(opened, SETTINGS) as session:
        sampling = Sampling(TOKENS, ignore_eos=True)
        return [
            [token.token_id for token in session.tokens(session.encode(prompt), sampling)]
            for prompt in PROMPTS
        ]


def test_each_client_is_told_of_its_own_drafts(
    server: Running, client: OpenAI, web: httpx2.Client, expected: list[list[int]]
) -> None:
    def ask(number: int) -> object:
        own = {"speculative.n_max": 0} if number == 3 else {"speculative.n_max": 16}
        body = EXACT | {"extra_body": EXACT["extra_body"] | own}
        return client.completions.create(prompt=PROMPTS[number], max_tokens=TOKENS, **body)

    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(ask, range(4)))
    assert [one.moectl["token_ids"] for one in answers] == expected
    assert not hasattr(answers[3], "timings")
    told = [one.timings for one in answers[:3]]
    for one, timings in zip(answers, told, strict=False):
        counters = one.moectl["counters"]
        assert timings == {"draft_n": counters["drafted"], "draft_n_accepted": counters["accepted"]}
        assert f"{timings['draft_n_accepted']} of {timings['draft_n']} drafts" in one.moectl["line"]
    assert sum(one["draft_n_accepted"] for one in told) > 0
    lines = web.get("/metrics").text.splitlines()
    for name, key in (("drafted", "draft_n"), ("accepted", "draft_n_accepted")):
        assert f"moectl_{name}_tokens_total {sum(one[key] for one in told):.1f}" in lines
    said = web.get("/live").json()["receipt"]["draft"]
    assert said["drafter"] == "ngram" and said["drafted"] == sum(one["draft_n"] for one in told)


def test_a_stream_ends_with_its_drafts_and_a_stop_ends_it_within_them(
    client: OpenAI, opened: MoeModel, expected: list[list[int]]
) -> None:
    text = opened.tokenizer.decode(expected[0], skip_special_tokens=True)
    stop = text[len(text) // 2 :][:4]
    chunks = list(
        client.completions.create(
            prompt=PROMPTS[0], max_tokens=TOKENS, stop=[stop], stream=True, **EXACT
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].timings["draft_n"] > 0 and chunks[-1].moectl["passes"] > 0
    with pytest.raises(openai.BadRequestError, match="speculative.n_max"):
        client.completions.create(prompt="x", model="tiny", extra_body={"speculative.n_max": -1})
