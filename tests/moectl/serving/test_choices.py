"""Answers with a form, log probabilities, several answers and several prompts, by OpenAI's own
client."""

import json
from functools import partial
from typing import Literal

import httpx2
import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from runtime.model.open import MoeModel
from runtime.session.generation.grammar import grammar_child
from runtime.session.generation.sampling import Sampling
from runtime.session.replies import registry
from runtime.session.replies.kinds import thinking
from runtime.session.replies.registry import REASONING, known_kinds, reply_kind
from runtime.session.session import Session
from tests.helpers.serving import SETTINGS, Running

pytestmark = pytest.mark.slow

DRAWN = {"model": "tiny", "max_tokens": 12, "seed": 5}
CHAT = {"messages": [{"role": "user", "content": "sheep"}]}


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=30)
    names: list[Literal["Tom", "Rex"]] = Field(max_length=2)
    is_tame: bool | None


def test_a_model_of_pydantic_is_parsed(client: OpenAI) -> None:
    """Random weights know no JSON: what they write is the grammar's."""
    given = {"model": "tiny", "response_format": Pet, "max_tokens": 150} | CHAT
    for seed in range(3):
        [choice] = client.chat.completions.parse(**given, seed=seed).choices
        assert isinstance(choice.message.parsed, Pet) and choice.finish_reason == "stop"
    with client.chat.completions.stream(**given, seed=4) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Pet)


def test_json_is_valid_by_its_schema_and_cut_by_max_tokens(client: OpenAI) -> None:
    schema = {
        "type": "array",
        "items": {"anyOf": [{"type": "integer"}, {"enum": ["a", None]}]},
        "minItems": 2,
        "maxItems": 4,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
    one = client.chat.completions.create(
        **DRAWN | CHAT | {"max_tokens": 150}, response_format=asked
    )
    jsonschema.validate(json.loads(one.choices[0].message.content), schema)
    cut = client.chat.completions.create(
        **DRAWN | CHAT | {"max_tokens": 1}, response_format={"type": "json_object"}
    )
    assert cut.choices[0].finish_reason == "length"
    assert cut.choices[0].message.content == "{"
    own = {"extra_body": {"regex": "(yes|no)!"}}
    kept = client.completions.create(prompt="sheep", **DRAWN, **own).choices[0]
    assert kept.text in ("yes!", "no!") and kept.finish_reason == "stop"


def test_several_answers_draw_by_seeds_that_follow(client: OpenAI) -> None:
    single = [
        client.chat.completions.create(**DRAWN | CHAT | {"seed": 5 + number}) for number in range(3)
    ]
    texts = [one.choices[0].message.content for one in single]
    several = client.chat.completions.create(**DRAWN | CHAT, n=3)
    assert [(one.index, one.message.content) for one in several.choices] == list(enumerate(texts))
    assert len(set(texts)) == 3
    assert several.usage.prompt_tokens == single[0].usage.prompt_tokens
    assert several.usage.completion_tokens == sum(one.usage.completion_tokens for one in single)
    streamed = ["", "", ""]
    ends = []
    more = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.chat.completions.create(**DRAWN | CHAT, n=3, **more):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
        used = chunk.usage
    assert streamed == texts and sorted(ends) == [0, 1, 2] and used == several.usage


def test_several_prompts_are_answered_in_their_order(client: OpenAI) -> None:
    prompts = ["sheep", "An old dog"]
    single = [client.completions.create(prompt=one, **DRAWN) for one in prompts]
    texts = [one.choices[0].text for one in single]
    several = client.completions.create(prompt=prompts, **DRAWN, echo=True, n=2)
    assert [one.index for one in several.choices] == [0, 1, 2, 3]
    assert [one.text for one in several.choices[::2]] == [
        prompt + text for prompt, text in zip(prompts, texts, strict=True)
    ]
    assert several.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in single)
    streamed = [""] * 4
    for chunk in client.completions.create(prompt=prompts, **DRAWN, echo=True, n=2, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [one.text for one in several.choices]


def test_options_are_those_of_a_run(client: OpenAI, opened: MoeModel) -> None:
    own = {"min_p": 0.2, "top_k": 0, "counters": True}
    asked = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"7": -100}}
    told = client.completions.create(prompt="sheep", **DRAWN, **asked, extra_body=own)
    given = {"temperature": 1.0, "top_k": 0, "seed": 5, "min_p": 0.2, "logit_bias": ((7, -100.0),)}
    with Session(opened, SETTINGS) as session:
        sampling = Sampling(12, presence_penalty=0.5, frequency_penalty=-0.5, **given)
        tokens = session.tokens(session.encode("sheep"), sampling)
        assert told.moectl["token_ids"] == [token.token_id for token in tokens]


@pytest.mark.parametrize("stop", [None, "wx"])
def test_log_probabilities_stay_beside_their_text(
    client: OpenAI, opened: MoeModel, stop: str | None
) -> None:
    """The stop is held back while it may come, and cut when it came."""
    forced = {"grammar": 'start: "abwvabwxyz"'}
    asked = DRAWN | CHAT | {"logprobs": True, "top_logprobs": 2, "stop": stop, "extra_body": forced}
    whole = client.chat.completions.create(**asked).choices[0]
    text = "abwvab" if stop else "abwvabwxyz"
    assert whole.message.content == text
    entries = whole.logprobs.content
    assert bytes(sum((one.bytes for one in entries), [])).decode() == text
    for one in entries:
        assert len(one.top_logprobs) == 2 and one.token == bytes(one.bytes).decode()
        assert one.logprob <= one.top_logprobs[0].logprob <= 0
    streamed = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        part = choice.logprobs.content if choice.logprobs else []
        assert "".join(one.token for one in part) == (choice.delta.content or "")
        streamed += part
    assert streamed == entries


def test_log_probabilities_of_a_completion(client: OpenAI) -> None:
    asked = {"prompt": "sheep", "logprobs": 3, **DRAWN, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**asked).choices[0]
    log = whole.logprobs
    assert "".join(log.tokens) == whole.text
    assert [whole.text[start:][:1] for start in log.text_offset] == [one[0] for one in log.tokens]
    for token, value, top in zip(log.tokens, log.token_logprobs, log.top_logprobs, strict=True):
        assert top[token] == value and 3 <= len(top) <= 4
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True)]
    assert sum((one.text_offset for one in parts if one), []) == log.text_offset
    none = client.completions.create(**asked | {"logprobs": 0}).choices[0].logprobs
    assert none.token_logprobs == log.token_logprobs


def test_a_bad_form_of_one_request_leaves_the_others(web: httpx2.Client) -> None:
    deep: dict = {"type": "string"}
    for _ in range(150):
        deep = {"type": "array", "items": deep}
    form = {"type": "json_schema", "json_schema": {"name": "deep", "schema": deep}}
    answer = web.post("/v1/chat/completions", json=CHAT | {"response_format": form})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and "\n" not in message
    again = web.post("/v1/completions", json={"prompt": "sheep", "max_tokens": 1})
    assert again.status_code == 200


def test_a_form_is_the_whole_reply_of_a_model_that_thinks(
    server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its template is told not to think, and what it writes is not taken for thoughts."""
    template = (
        "{{ messages[0].content }}{% if enable_thinking is not defined or enable_thinking %}"
        "<think>{% endif %}{# </think> #}"
    )
    monkeypatch.setattr(server.scheduler.session.opened.tokenizer, "chat_template", template)
    asked = DRAWN | CHAT | {"extra_body": {"regex": "ab{3}"}}
    formed = client.chat.completions.create(**asked)
    assert formed.choices[0].message.content == "abbb" and formed.usage.prompt_tokens == 5
    just = client.chat.completions.create(**asked | {"max_tokens": 4}).choices[0]
    assert (just.message.content, just.finish_reason) == ("abbb", "stop")
    thinks = client.chat.completions.create(**asked, reasoning_effort="high").choices[0].message
    assert thinks.content == "abbb" and not hasattr(thinks, "reasoning_content")
    tool = {"type": "function", "function": {"name": "look"}}
    with pytest.raises(openai.BadRequestError, match="a regex calls no tool"):
        client.chat.completions.create(**asked, tools=[tool])
    assert client.chat.completions.create(**asked, tools=[tool], tool_choice="none")


@pytest.mark.parametrize("begun", ["", "["])
def test_a_model_thinks_before_a_form_or_a_call(
    begun: str, server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mark around the thoughts is one token; the prompt or the model writes the first."""
    monkeypatch.setattr(registry, "_KINDS", dict(known_kinds()))
    parse = partial(thinking._between, opening="[", closing="]")
    reply_kind("waves", REASONING, signs=("{# waves #}",), markers=("[", "]"))(parse)
    tokenizer = server.scheduler.session.opened.tokenizer
    template = "{{ messages[0].content }}{{ tools and '' }}" + begun + "{# waves #}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    begin, end = tokenizer.convert_tokens_to_ids(["[", "]"])
    asked = DRAWN | CHAT | {"max_tokens": 200, "logit_bias": {begin: 9, end: 4}}
    formed = client.chat.completions.create(**asked, extra_body={"regex": "ab{3}"})
    thought = formed.choices[0].message.reasoning_content
    assert thought and formed.choices[0].message.content == "abbb"
    told = formed.usage.completion_tokens_details.reasoning_tokens
    assert formed.usage.completion_tokens == told + len("]abbb")
    assert told >= len(thought) + (not begun)
    tool = {"type": "function", "function": {"name": "look"}}
    [choice] = client.chat.completions.create(**asked, tools=[tool], tool_choice="required").choices
    assert choice.finish_reason in ("tool_calls", "length")
    assert choice.message.reasoning_content and choice.message.tool_calls[0].function.name == "look"


def test_a_mask_that_fails_ends_its_answer_in_one_line(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = partial(grammar_child.LLParserLimits, max_lexer_states=20)
    monkeypatch.setattr(grammar_child, "LLParserLimits", few)
    asked = DRAWN | CHAT | {"extra_body": {"regex": "(a|b){0,3}c(d|e){3,9}f"}}
    with pytest.raises(openai.BadRequestError) as failed:
        client.chat.completions.create(**asked)
    assert failed.value.body["message"] == (
        "the answer cannot go on by its grammar, make it simpler: lexer error: too many states: "
        "20 >= 20"
    )


def test_beside_tools_a_form_leaves_room_for_a_call(
    server: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As agents ask that give an answer of a type; the form's members are named as a call's are."""
    tokenizer = server.scheduler.session.opened.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content }}{{ tools | length }}")
    members = {"name": {"$ref": "#/$defs/pet"}, "age": {"enum": [1, 2]}}
    schema = {"type": "object", "properties": members, "required": ["name", "age"]}
    schema |= {"additionalProperties": False, "$defs": {"pet": {"enum": ["look", "Tom"]}}}
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema}}
    where = {"type": "object", "properties": {"at": {"enum": ["a", "b"]}}, "required": ["at"]}
    where |= {"additionalProperties": False}
    tool = {"type": "function", "function": {"name": "look", "parameters": where}}
    kinds = set()
    for seed in range(6):
        asked = DRAWN | CHAT | {"seed": seed, "max_tokens": 200, "tools": [tool]}
        [choice] = client.chat.completions.create(**asked, response_format=form).choices
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            [call] = choice.message.tool_calls
            jsonschema.validate(json.loads(call.function.arguments), where)
            assert call.function.name == "look" and not choice.message.content
        else:
            jsonschema.validate(json.loads(choice.message.content), schema)
    assert kinds == {"stop", "tool_calls"}
