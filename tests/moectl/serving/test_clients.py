"""Clients that people use, against a served model that thinks, calls a tool and tells its result."""

from collections.abc import Iterator

import anthropic
import openai
import pytest
from openai import OpenAI

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
