"""Bodies of requests: every field of OpenAI's reference is followed, ignored as documented, or
refused by name."""

import json

import pytest
from openai.types import chat
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from pydantic import BaseModel, ValidationError

from artifacts.errors import BadUsage
from moectl.serving.openai_api import (
    ChatBody,
    CompletionBody,
    Message,
    StreamOptions,
    names_of,
    unknown_names,
)
from tests import ROOT

VALUES = [
    None,
    False,
    True,
    0,
    1,
    2,
    -1,
    0.0,
    1.0,
    0.5,
    1e-3,
    10**30,
    "",
    "a",
    "1",
    "none",
    "auto",
    "default",
    "medium",
]
VALUES += [
    [],
    [1],
    ["text"],
    ["a", ""],
    [["a"], ["b"]],
    [True],
    [None],
    {},
    {"a": "b"},
    {"a": 1},
    {"type": "text"},
]
VALUES += [
    {"type": "json_object"},
    {"type": "text", "text": "a"},
    [{"type": "text", "text": "a"}],
    "text",
]
VALUES += [
    [{"type": "text", "text": "a", "detail": "high"}],
    [{"type": "image_url", "image_url": "a"}],
    ["a"] * 5,
]

TEXTS = [value for value in VALUES if isinstance(value, str)]
FULL = [value for value in TEXTS if value]
COUNTS = [None, 1, 2, 10**30]
FLAGS = [None, False, True]
PENALTIES = [None, 0, 1, 2, -1, 0.0, 1.0, 0.5, 1e-3]
BOTH = {
    "model": TEXTS,  # empty: the served one
    "speculative.n_max": [0, 1, 2, 10**30],
    "stream": FLAGS,
    "stream_options": [None],  # the rest goes with `stream`
    "max_tokens": COUNTS,
    "temperature": [None, 0, 1, 2, 0.0, 1.0, 0.5, 1e-3],
    "top_p": [None, 1, 1.0, 0.5, 1e-3],
    "seed": [None, 0, 1, 2, -1],
    "stop": [None, *FULL, [], ["text"], ["a"] * 5],
    "n": [None, 1, 2],
    "frequency_penalty": PENALTIES,
    "presence_penalty": PENALTIES,
    "logit_bias": [None, {}],
    "response_format": [None, {"type": "text"}, {"type": "json_object"}],
    "min_p": [0, 1, 0.0, 1.0, 0.5, 1e-3],
    "grammar": [None, *TEXTS],
    "regex": [None, *TEXTS],
    "user": [None, *TEXTS],
    "top_k": [0, 1, 2, 10**30],
    "repetition_penalty": [None, 1, 2, 1.0, 0.5, 1e-3, 10**30],
    "ignore_eos": FLAGS[1:],
    "counters": FLAGS[1:],
}
COMPLETION = BOTH | {
    "prompt": [*FULL, [1], ["text"], ["a"] * 5],
    "best_of": [None, 1],
    "echo": FLAGS,
    "suffix": [None, ""],
    "logprobs": [None, 0, 1, 2],
}
CHAT = BOTH | {
    "messages": [],
    "max_completion_tokens": COUNTS,
    "logprobs": FLAGS,
    "top_logprobs": [None, 0],  # the rest goes with `logprobs`
    "tools": [None, []],
    "tool_choice": [None, "none", "auto"],
    "functions": [None, []],
    "function_call": [None, "none"],
    "modalities": [None, ["text"]],
    "audio": [None],
    "prediction": [None],
    "reasoning_effort": [None, "none", "medium"],
    "chat_template_kwargs": [None, *(value for value in VALUES if isinstance(value, dict))],
    "verbosity": [None, "medium"],
    "web_search_options": [None],
    "moderation": [None],
    "store": [None, False],
    "service_tier": [None, "auto", "default"],
    "metadata": [
        None,
        {},
        {"a": "b"},
        {"type": "text"},
        {"type": "json_object"},
        {"type": "text", "text": "a"},
    ],
    "parallel_tool_calls": FLAGS,
    "safety_identifier": [None, *TEXTS],
    "prompt_cache_key": [None, *TEXTS],
    "prompt_cache_retention": [None, *TEXTS],
}
CHAT["prompt_cache_options"] = CHAT["metadata"]
MESSAGE = {
    "role": [],
    "content": [*TEXTS, [{"type": "text", "text": "a"}]],
    "name": [None, *TEXTS],
    "refusal": [None],
    "tool_calls": [None, []],
    "tool_call_id": [None, *TEXTS],
    "reasoning_content": [None, *TEXTS],
    "function_call": [None],
    "audio": [None],
    "annotations": [None, []],
}
OPTIONS = {"include_usage": FLAGS[1:], "include_obfuscation": [None, False]}

LEAST = {
    CompletionBody: {"model": "tiny", "prompt": "sheep"},
    ChatBody: {"model": "tiny", "messages": [{"role": "user", "content": "sheep"}]},
    Message: {"role": "user", "content": "sheep"},
    StreamOptions: {},
}
ACCEPTED = {CompletionBody: COMPLETION, ChatBody: CHAT, Message: MESSAGE, StreamOptions: OPTIONS}
CASES = [(body, name) for body, fields in ACCEPTED.items() for name in fields]


def refused(body: type[BaseModel], given: dict) -> tuple | None:
    """Where the first error of the body is, None if it is accepted."""
    try:
        body.model_validate(given)
    except ValidationError as error:
        return error.errors()[0]["loc"]
    return None


@pytest.mark.parametrize(
    ("body", "name"), CASES, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_value_is_followed_or_refused_by_name(body: type[BaseModel], name: str) -> None:
    """0, false and an empty text are told apart, whatever Python thinks of them."""
    where = {repr(value): refused(body, LEAST[body] | {name: value}) for value in VALUES}
    assert [text for text in where if where[text] is None] == [
        repr(value) for value in VALUES if repr(value) in map(repr, ACCEPTED[body][name])
    ]
    assert {loc[0] for loc in where.values() if loc is not None} <= {name}


@pytest.mark.parametrize(
    ("body", "reference"),
    [
        (CompletionBody, [completions.CompletionCreateParamsNonStreaming]),
        (ChatBody, [chats.CompletionCreateParamsNonStreaming]),
        (Message, [chat.ChatCompletionAssistantMessageParam, chat.ChatCompletionUserMessageParam]),
        (StreamOptions, [chat.ChatCompletionStreamOptionsParam]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_field_of_the_reference_is_known(
    body: type[BaseModel], reference: list[type]
) -> None:
    named = {name for kind in reference for name in kind.__annotations__}
    assert named <= {*names_of(body)} == ACCEPTED[body].keys()
    assert list(unknown_names(body(**LEAST[body], temprature=1))) == ["temprature"]


def test_the_values_are_those_of_the_request() -> None:
    short, chatted = (LEAST[body] | {"max_tokens": 3} for body in (CompletionBody, ChatBody))
    assert (CompletionBody(**LEAST[CompletionBody]).num_new, CompletionBody(**short).num_new) == (
        16,
        3,
    )
    assert (ChatBody(**LEAST[ChatBody]).num_new, ChatBody(**chatted).num_new) == (None, 3)
    assert ChatBody(**LEAST[ChatBody], max_completion_tokens=4).num_new == 4
    assert refused(ChatBody, chatted | {"max_completion_tokens": 3}) == ("max_completion_tokens",)
    assert refused(CompletionBody, short | {"stream": False, "stream_options": {}}) == (
        "stream_options",
    )
    streamed = short | {"stream": True}
    assert (
        not CompletionBody(**streamed).has_usage
        and not CompletionBody(**streamed, stream_options={}).has_usage
    )
    assert CompletionBody(**streamed, stream_options={"include_usage": True}).has_usage
    exact = CompletionBody(**short, temperature=0, top_p=0.5, seed=0, top_k=0, stop="a").sampling(3)
    assert (exact.max_new_tokens, exact.temperature, exact.top_p, exact.seed, exact.top_k) == (
        3,
        0,
        0.5,
        0,
        0,
    )
    free = [CompletionBody(**short).sampling(3) for _ in range(2)]
    assert (free[0].temperature, free[0].top_p, free[0].top_k, free[0].repetition_penalty) == (
        1,
        1,
        0,
        None,
    )
    assert free[0].seed != free[1].seed


def test_tools_and_what_the_model_must_call() -> None:
    parameters = {"$defs": {"X": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/X"}}}
    tools = [
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "g", "parameters": parameters}},
    ]
    asked = LEAST[ChatBody] | {"tools": tools}
    free = ChatBody(**asked, parallel_tool_calls=False, reasoning_effort="none")
    prompt = free.prompt()
    assert (prompt.tools, prompt.max_calls, prompt.must_call) == (tools, 1, False)
    assert prompt.options == {"enable_thinking": False, "thinking": False}
    assert free.sampling(3).grammar is None and ChatBody(**asked, tool_choice="none").prompt() == (
        ChatBody(**LEAST[ChatBody]).prompt()
    )
    named = {"type": "function", "function": {"name": "g"}}
    for choice, names in (("required", ["f", "g"]), (named, ["g"])):
        held = ChatBody(**asked, tool_choice=choice)
        schemas = json.loads(held.sampling(3).grammar.text)["anyOf"]
        assert [one["properties"]["name"]["const"] for one in schemas] == names
        member = schemas[-1]["properties"]["arguments"]["properties"]["a"]
        place = f"#/anyOf/{len(names) - 1}/properties/arguments"
        assert member == {"$ref": f"{place}/$defs/X"} and held.prompt().must_call
    assert refused(ChatBody, LEAST[ChatBody] | {"tool_choice": "required"}) == ("tool_choice",)
    assert refused(ChatBody, asked | {"tool_choice": named | {"function": {"name": "h"}}}) == (
        "tool_choice",
    )
    assert refused(ChatBody, asked | {"tools": tools[:1] * 2}) == ("tools",)
    with pytest.raises(BadUsage, match="'tools' is no option of a chat template"):
        ChatBody(**asked, chat_template_kwargs={"tools": []}).prompt()


def test_a_message_with_calls_may_have_no_content() -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}]
    given = {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "so"}
    assert Message(**given).turn == given
    answer = {"role": "tool", "content": "wet", "tool_call_id": "a"}
    assert Message(**answer).turn == answer
    assert refused(Message, given | {"role": "user"}) == ("content",)
    assert refused(Message, {"role": "assistant"}) == ("content",)


def test_borders() -> None:
    def completion(**given: object) -> tuple | None:
        return refused(CompletionBody, LEAST[CompletionBody] | given)

    assert (
        completion(stop=["a"] * 16)
        is completion(logit_bias={"5": -100, "7": 2.5})
        is completion(prompt=[0, 2**31 - 1])
        is completion(seed=-(2**63))
        is None
    )
    for given in (
        {"stop": ["a"] * 17},
        {"n": 129},
        {"logprobs": 6},
        {"logit_bias": {"5": 101}},
        {"logit_bias": {"-5": 1}},
        {"logit_bias": {"5": True}},
        {"prompt": [0, 2**31]},
        {"prompt": [-1]},
        {"seed": 2**63},
        {"max_tokens": 0},
    ):
        assert completion(**given) == tuple(given)
    assert completion(repetition_penalty=float("inf")) == ("repetition_penalty",)
    for given in ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}):
        assert refused(ChatBody, LEAST[ChatBody] | given) == ("top_logprobs",)
    assert refused(ChatBody, LEAST[ChatBody] | {"logprobs": True, "top_logprobs": 20}) is None
    for part in ({"type": "a", "text": "b"}, {"type": "video", "text": "b"}, {"text": "b"}, "text"):
        assert refused(Message, {"role": "user", "content": [part]}) == ("content",)
    with pytest.raises(ValidationError, match='can only be "auto" here: leave it out'):
        ChatBody(**LEAST[ChatBody], service_tier="priority")
    body = CompletionBody(**LEAST[CompletionBody])
    assert (body.stream, body.ignore_eos, body.counters, body.has_usage) == (
        None,
        False,
        False,
        False,
    )


def test_the_page_names_every_field() -> None:
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    names = {name for body in (CompletionBody, ChatBody, Message) for name in names_of(body)}
    names |= {f"stream_options.{name}" for name in StreamOptions.model_fields}
    assert {name for name in names - {"stream_options"} if f"`{name}`" not in page} == set()


def test_a_developer_is_the_system() -> None:
    roles = ["system", "developer", "user", "assistant", "tool"]
    told = [Message(role=role, content="a").role for role in roles]
    assert told == ["system", "system", "user", "assistant", "tool"]
    for role in ("function", "", True, None):
        assert refused(Message, {"role": role, "content": "a"}) == ("role",)
    parts = [{"type": "text", "text": "old "}, {"type": "text", "text": "gate"}]
    assert Message(role="user", content=parts).turn == {"role": "user", "content": "old gate"}
    named = Message(role="user", content="a", name="bob").turn
    assert named == {"role": "user", "content": "a", "name": "bob"}
