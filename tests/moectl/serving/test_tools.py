"""Reasoning and calls of tools by OpenAI's client, whole and streamed. A random model does neither
by itself: a grammar holds its answers to what a trained one writes."""

import json
from collections.abc import Iterator
from dataclasses import replace

import openai
import pytest
from openai import OpenAI

from moectl.serving.guard import ServerLimits
from moectl.serving.openai_api import RequestBody
from runtime.model.open import open_model
from runtime.session.generation.grammar.grammars import Grammar
from runtime.session.generation.sampling import Sampling
from tests import ROOT
from tests.conftest import Checkpoint
from tests.helpers.serving import SETTINGS, serving

TEMPLATE = ROOT / "tests" / "data" / "replies" / "qwen3.jinja"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 5}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "sheep"}], "max_tokens": 200}
CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "[a-z]{3}"\}\}\n</tool_call>'
REPLY = rf"<think>\n[a-z]{{4}}\n</think>\n\n[a-z]{{5}}\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def client(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    opened = open_model(str(checkpoint("olmoe")))
    opened.tokenizer.chat_template = TEMPLATE.read_text()
    opened.model.config.max_position_embeddings = 2048  # its tokens are characters
    limits = ServerLimits(num_rows=2, shares_passes=True)
    store = tmp_path_factory.mktemp("tools") / "none.duckdb"
    with serving(opened, SETTINGS, limits, store) as running:
        yield running.client()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold answers to REPLY."""
    free = RequestBody.sampling

    def held(body: RequestBody, num_new: int) -> Sampling:
        return replace(free(body, num_new), grammar=Grammar("regex", REPLY))

    monkeypatch.setattr(RequestBody, "sampling", held)


@pytest.mark.usefixtures("scripted")
def test_a_streamed_answer_has_the_deltas_of_the_whole_one(client: OpenAI) -> None:
    asked = ASKED | {"tools": [TOOL], "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0]
    message = whole.message
    assert whole.finish_reason == "tool_calls"
    assert len(message.reasoning_content) == 4 and len(message.content) == 5
    assert [call.function.name for call in message.tool_calls] == ["weather", "weather"]
    assert all(len(json.loads(call.function.arguments)["city"]) == 3 for call in message.tool_calls)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    begun = [call for delta in deltas for call in delta.tool_calls or () if call.id]
    assert [(call.index, call.type, call.function.name) for call in begun] == [
        (0, "function", "weather"),
        (1, "function", "weather"),
    ]
    for index, call in enumerate(message.tool_calls):
        parts = [one for delta in deltas for one in delta.tool_calls or () if one.index == index]
        assert "".join(one.function.arguments for one in parts) == call.function.arguments
        assert len(parts) > 5
    told = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(told) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.usefixtures("scripted")
def test_what_a_request_asks_of_calls(client: OpenAI) -> None:
    """One call with `parallel_tool_calls: false`; without tools text; a stop is no part of it."""
    asked = ASKED | {"temperature": 0}
    [one] = client.chat.completions.create(**asked, tools=[TOOL], parallel_tool_calls=False).choices
    assert one.finish_reason == "tool_calls" and len(one.message.tool_calls) == 1
    none = client.chat.completions.create(**asked, tools=[TOOL], tool_choice="none").choices[0]
    assert none.finish_reason == "stop" and none.message.content.count("<tool_call>") == 2
    assert none.message.tool_calls is None and none.message.reasoning_content
    cut = client.chat.completions.create(**asked, tools=[TOOL], stop=one.message.content[2:4])
    assert cut.choices[0].message.content == one.message.content[:2]
    assert cut.choices[0].finish_reason == "stop" and cut.choices[0].message.reasoning_content
    short = client.chat.completions.create(**(asked | {"max_tokens": 110}), tools=[TOOL]).choices[0]
    assert short.finish_reason == "length" and short.message.tool_calls[0].function.arguments


def test_the_loop_of_an_agent(client: OpenAI) -> None:
    """What must be called is; the message goes back as it came, with the tool's result."""
    other = {"type": "function", "function": {"name": "say"}}
    asked = ASKED | {"tools": [other, TOOL]}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = client.chat.completions.create(**asked, tool_choice=choice, seed=1).choices[0]
        [call] = answer.message.tool_calls
        named = ["say", "weather"] if choice == "required" else ["weather"]
        assert call.function.name in named and answer.message.content is None
        assert isinstance(json.loads(call.function.arguments), dict)
    result = {"role": "tool", "tool_call_id": call.id, "content": "wet"}
    turns = [*ASKED["messages"], answer.message, result]
    last = client.chat.completions.create(**(asked | {"messages": turns, "max_tokens": 4}))
    shorter = client.chat.completions.create(**(asked | {"max_tokens": 4}))
    assert last.usage.prompt_tokens > shorter.usage.prompt_tokens


def test_options_of_the_template(client: OpenAI) -> None:
    def num_tokens(**options: object) -> int:
        asked = ASKED | {"max_tokens": 1} | options
        return client.chat.completions.create(**asked).usage.prompt_tokens

    off = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    assert num_tokens(**off) == num_tokens(reasoning_effort="none") > num_tokens()
    for options, told in (
        ({"tools": []}, "'tools' is no option of a chat template"),
        ({"bos_token": ""}, "bos_token is the model's own"),
    ):
        with pytest.raises(openai.BadRequestError, match=told):
            num_tokens(extra_body={"chat_template_kwargs": options})


def test_torments_end_in_one_line(client: OpenAI) -> None:
    deep = json.loads('{"items": ' * 150 + "{}" + "}" * 150)
    wide = {"properties": {f"p{n}": {"enum": list(range(100))} for n in range(200)}}
    for parameters in (deep, wide, {"type": "nonsense"}, {"$ref": "#/nowhere"}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        try:
            answer = client.chat.completions.create(
                **(ASKED | {"max_tokens": 8}), tools=[tool], tool_choice="required"
            )
            assert answer.choices[0].finish_reason == "length"
        except openai.BadRequestError as error:
            assert "\n" not in error.body["message"]
