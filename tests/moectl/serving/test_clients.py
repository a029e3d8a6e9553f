"""Clients that people use, against a served model that thinks, calls a tool and tells its result."""

import json
from collections.abc import Iterator
from typing import Literal

import anthropic
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from moectl.serving.guard import ServerLimits
from runtime.model.open import open_model
from tests.helpers import scripted
from tests.helpers.serving import SETTINGS, Running, serving

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
QUESTION = "What is 2 + 3?"
THOUGHT = "Add them."
TOLD = "It is 5."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("scripted")
    limits = ServerLimits(num_rows=None, shares_passes=True)
    with serving(
        open_model(str(scripted.save(folder))), SETTINGS, limits, folder / "db"
    ) as running:
        yield running


@pytest.fixture
def claude(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)


def test_a_response(client: OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="sheep?", instructions="Be kind.")
    thought, said = answer.output
    assert (thought.type, thought.content[0].text, answer.output_text) == (
        "reasoning",
        "A sheep?",
        "Good day.",
    )
    assert (answer.status, said.status, answer.usage.output_tokens) == ("completed",) * 2 + (7,)
    again = [
        {"role": "user", "content": "sheep?"},
        *answer.output,
        {"role": "user", "content": "?"},
    ]
    cut = client.responses.create(model="tiny", input=again, max_output_tokens=4)
    assert (cut.status, cut.incomplete_details.reason, cut.output_text) == (
        "incomplete",
        "max_output_tokens",
        "Good ",
    )


def test_a_response_is_streamed_in_order(client: OpenAI) -> None:
    with client.responses.stream(model="tiny", input="sheep?") as stream:
        events = list(stream)
        whole = stream.get_final_response()
    places = ((event.type, getattr(event, "output_index", None)) for event in events)
    item = ["output_item.added", "content_part.added", "{}.delta", "{}.done"]
    item += ["content_part.done", "output_item.done"]
    order = [("response.created", None), ("response.in_progress", None)]
    for index, name in enumerate(("reasoning_text", "output_text")):
        order += [(f"response.{one.format(name)}", index) for one in item]
    assert list(dict.fromkeys(places)) == [*order, ("response.completed", None)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert whole.output_text == "Good day." and whole.usage.output_tokens == 7


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"previous_response_id": "resp_1"}, "nothing is stored here: send the whole"),
        ({"input": [{"type": "image_generation_call"}]}, "image_generation_call are not served"),
        ({"input": [{"type": "function_call", "name": "add"}]}, "a function_call needs other"),
        ({"tools": [{"type": "web_search"}]}, "tools of the type web_search are not served"),
        ({"background": True}, "background: Input should be False"),
        ({"max_output_tokens": 5000}, "exceed the model's 2048 positions"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_response_that_is_refused(client: OpenAI, asked: dict, told: str) -> None:
    with pytest.raises(openai.BadRequestError, match=told):
        client.responses.create(**{"model": "tiny", "input": "sheep?"} | asked)


def test_a_message(claude: anthropic.Anthropic) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "sheep?"}]}
    answer = claude.messages.create(**asked, max_tokens=40, system="Be kind.")
    thought, said = answer.content
    assert (thought.thinking, said.text, answer.stop_reason) == (
        "A sheep?",
        "Good day.",
        "end_turn",
    )
    with claude.messages.stream(**asked, max_tokens=40) as stream:
        kinds = [event.type for event in stream]
        whole = stream.get_final_message()
    assert [one.model_dump() for one in whole.content][0]["thinking"] == "A sheep?"
    assert whole.content[1].text == "Good day." and whole.usage.output_tokens == 7
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    ours = [kind for kind in kinds if kind not in ("text", "thinking")]
    assert list(dict.fromkeys(ours)) == ["message_start", *block, "message_delta", "message_stop"]
    turns = [*asked["messages"], {"role": "assistant", "content": answer.content}]
    turns.append({"role": "user", "content": [{"type": "text", "text": "sheep?"}]})
    for own, reason, text in (
        ({"stop_sequences": ["x", "day"]}, ("stop_sequence", "day"), "Good "),
        ({"max_tokens": 4}, ("max_tokens", None), "Good "),
    ):
        cut = claude.messages.create(**{"model": "tiny", "messages": turns, "max_tokens": 40} | own)
        assert ((cut.stop_reason, cut.stop_sequence), cut.content[-1].text) == (reason, text)
    count = claude.messages.count_tokens(**asked).input_tokens
    used = claude.messages.create(**asked, max_tokens=1).usage
    assert count == used.input_tokens + used.cache_read_input_tokens


def test_a_message_that_is_refused(server: Running, claude: anthropic.Anthropic) -> None:
    asked = {"max_tokens": 4, "messages": [{"role": "user", "content": "sheep?"}]}
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    for own, kind, told in (
        ({"model": "none"}, "not_found_error", "there is no model 'none' here, only 'tiny'"),
        ({"messages": []}, "invalid_request_error", "messages: List should have at least 1 item"),
        ({"messages": image}, "invalid_request_error", "type image are not served: send text"),
    ):
        with pytest.raises(anthropic.APIStatusError) as refused:
            claude.messages.create(**{"model": "tiny"} | asked | own)
        assert refused.value.body["error"]["type"] == kind
        assert told in refused.value.body["error"]["message"]
    with pytest.raises(anthropic.AuthenticationError, match="the API key is wrong"):
        anthropic.Anthropic(base_url=server.url, api_key="guess").messages.create(
            model="tiny", **asked
        )


def test_tools_by_responses(client: OpenAI) -> None:
    """Whole and streamed; what was thought and called goes back with the result."""
    tools = [{"type": "function", "name": "add", "parameters": ADD}]
    asked = {"model": "tiny", "tools": tools}
    first = client.responses.create(**asked, input=QUESTION)
    thought, call = first.output
    assert (thought.content[0].text, call.name, json.loads(call.arguments)) == (
        THOUGHT,
        "add",
        {"a": 2, "b": 3},
    )
    with client.responses.stream(**asked, input=QUESTION) as stream:
        events = list(stream)
        whole = stream.get_final_response()
    arguments = [e for e in events if e.type.startswith("response.function_call_arguments")]
    assert arguments[-1].arguments == "".join(e.delta for e in arguments[:-1]) == call.arguments
    assert whole.output[-1].name == "add"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    said = [{"role": "user", "content": QUESTION}, *first.output, result]
    assert client.responses.create(**asked, input=said).output_text == TOLD


def test_tools_by_messages(claude: anthropic.Anthropic) -> None:
    asked = {"model": "tiny", "max_tokens": 60}
    asked["tools"] = [{"name": "add", "description": "Adds.", "input_schema": ADD}]
    turns = [{"role": "user", "content": QUESTION}]
    first = claude.messages.create(**asked, messages=turns)
    with claude.messages.stream(**asked, messages=turns) as stream:
        whole = stream.get_final_message()
    for answer in (first, whole):
        thought, call = answer.content
        assert (thought.thinking, call.name, call.input) == (THOUGHT, "add", {"a": 2, "b": 3})
        assert answer.stop_reason == "tool_use"
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "5"}],
    }
    turns += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    assert claude.messages.create(**asked, messages=turns).content[0].text == TOLD


class Verdict(BaseModel):
    verdict: Literal["yes", "no"]
    reason: Literal["old", "new"]


def test_structured_answers(client: OpenAI, claude: anthropic.Anthropic) -> None:
    """Of a model that would say something else."""
    turns = [{"role": "user", "content": "sheep?"}]
    chatted = client.chat.completions.parse(model="tiny", messages=turns, response_format=Verdict)
    assert isinstance(chatted.choices[0].message.parsed, Verdict)
    responded = client.responses.parse(model="tiny", input=turns, text_format=Verdict)
    assert isinstance(responded.output_parsed, Verdict)
    schema = {"type": "json_schema", "schema": Verdict.model_json_schema()}
    schema["schema"]["additionalProperties"] = False
    said = claude.messages.create(
        model="tiny", max_tokens=60, messages=turns, output_config={"format": schema}
    )
    assert Verdict.model_validate_json(said.content[-1].text)


@pytest.mark.slow  # langchain takes seconds to import
def test_langchain(server: Running) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    chat = ChatOpenAI(model="tiny", base_url=f"{server.url}/v1", api_key="secret")
    assert chat.invoke("sheep?").content == "Good day."
    turns = [HumanMessage(QUESTION)]
    turns.append(chat.bind_tools([add]).invoke(turns))
    [call] = turns[1].tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 2, "b": 3})
    turns.append(ToolMessage(add.invoke(call["args"]), tool_call_id=call["id"]))
    assert chat.bind_tools([add]).invoke(turns).content == TOLD
    assert "".join(part.content for part in chat.stream("sheep?")) == "Good day."
    assert isinstance(chat.with_structured_output(Verdict).invoke("sheep?"), Verdict)


@pytest.mark.slow  # litellm takes seconds to import
def test_litellm(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # asks no other host
    import litellm

    asked = {"messages": [{"role": "user", "content": QUESTION}], "api_key": "secret"}
    tools = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
    for model, base in (("hosted_vllm/tiny", f"{server.url}/v1"), ("anthropic/tiny", server.url)):
        told = litellm.completion(model=model, api_base=base, tools=tools, **asked)
        [call] = told.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
        assert told.choices[0].message.reasoning_content == THOUGHT


@pytest.mark.slow  # the agents take seconds to import
@pytest.mark.parametrize("kind", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
def test_an_agent(server: Running, kind: str) -> None:
    """The loop of openai-agents: the model calls a function, is told its result, and answers."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    summands = []

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add."""
        summands.append((a, b))
        return a + b

    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
    model = getattr(agents, kind)("tiny", client)
    agent = agents.Agent("adder", instructions="Add.", tools=[add], model=model)
    answer = agents.Runner.run_sync(agent, QUESTION, max_turns=3)
    assert (answer.final_output, summands) == (TOLD, [(2, 3)])
