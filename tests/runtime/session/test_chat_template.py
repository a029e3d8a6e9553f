"""Chats by the model's template: the text is transformers', and a template without end or measure
is ended."""

import json
import os
import threading
import time
from collections.abc import Iterator

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from artifacts.errors import BadInput, BadUsage
from moectl.bundled import demo_model
from runtime.session.prompts.chat_prompt import ChatPrompt
from runtime.session.prompts.chat_template import ChatTemplates
from tests import ROOT

TURNS = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": ' Grüße, <b>sheep</b> & "dogs" \n'},
    {"role": "assistant", "content": "<think>hm</think>\nYes.\u2028"},
    {"role": "user", "content": "日本 🐑 {{ 7 * 7 }}"},
]
TEMPLATES = {
    path.stem: path.read_text() for path in (ROOT / "tests" / "data" / "chat_templates").iterdir()
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_model())


@pytest.fixture(scope="module")
def templates() -> Iterator[ChatTemplates]:
    yield (templates := ChatTemplates(limit_s=0.5))
    templates.close()


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(
    name: str, templates: ChatTemplates, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = TEMPLATES[name]
    expected = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert templates.render(tokenizer, ChatPrompt(TURNS)) == expected and "Gr" in expected


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "gpt_oss"])
def test_tools_calls_and_options_reach_the_template(
    name: str, templates: ChatTemplates, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The arguments of a call, JSON for a client, are the object that most templates take."""
    template = (ROOT / "tests" / "data" / "replies" / f"{name}.jinja").read_text()
    tokenizer.chat_template = {"default": "no tools", "tool_use": template}
    given = {"city": "Köln"}
    function = {"name": "weather", "arguments": json.dumps(given)}
    calls = [{"id": "a", "type": "function", "function": function}]
    turns = [
        *TURNS,
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "so"},
        {"role": "tool", "content": "wet", "tool_call_id": "a"},
    ]
    options = {"enable_thinking": False, "reasoning_effort": "high"}
    chat = ChatPrompt(turns, [{"type": "function", "function": {"name": "weather"}}], options)
    text = templates.render(tokenizer, chat)
    if name != "deepseek_v3":  # whose template takes the text
        calls = [{"id": "a", "function": function | {"arguments": given}}]
        turns = [*TURNS, turns[-2] | {"tool_calls": calls}, turns[-1]]
    assert text == tokenizer.apply_chat_template(
        turns, tools=list(chat.tools), tokenize=False, add_generation_prompt=True, **options
    )
    assert {"qwen3": "</think>", "gpt_oss": "Reasoning: high"}.get(name, "wet") in text


def test_options_that_are_not_the_callers_are_refused(
    templates: ChatTemplates, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(BadUsage, match="'messages' is no option of a chat template"):
        ChatPrompt(TURNS, options={"messages": []})
    with pytest.raises(BadUsage, match="bos_token is the model's own"):
        templates.render(tokenizer, ChatPrompt(TURNS, options={"bos_token": ""}))


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ 'a' * 3000000000 }}", "takes more than 1024 MiB of memory"),
        (3 * "{% for _ in range(99999) %}" + 3 * "{% endfor %}", "takes more than 0.5 s"),
        (
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            r"cannot be used \(access to attribute '__class__'",
        ),
        ("{{ raise_exception('no system turns') }}", r"refuses these messages \(no system turns\)"),
        ("{{ " + 50_000 * "(" + " }}", "cannot be used"),
    ],
    ids=["repeated", "loops", "escape", "raised", "nested"],
)
def test_a_template_without_measure_is_ended_in_one_line(
    templates: ChatTemplates, tokenizer: PreTrainedTokenizerBase, template: str, told: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(
        BadInput, match=f"^the model's chat template {told}.*.*give a prompt of plain text instead$"
    ):
        templates.render(tokenizer, ChatPrompt(TURNS))
    tokenizer.chat_template = "{{ messages|length }}"
    assert templates.render(tokenizer, ChatPrompt(TURNS)) == "4"


def test_a_tokenizer_of_several_templates_needs_a_default(
    templates: ChatTemplates, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = {"default": "plain", "tool_use": "tools"}
    assert templates.render(tokenizer, ChatPrompt(TURNS)) == "plain"
    tokenizer.chat_template = {"rag": "texts", "tool_use": "tools"}
    with pytest.raises(BadInput, match="multiple chat templates with no default"):
        templates.render(tokenizer, ChatPrompt(TURNS))


def test_threads_take_turns_and_the_process_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    templates = ChatTemplates()
    texts = {}
    tokenizer.chat_template = "{{ messages[0].content }}"

    def ask(text: str) -> None:
        texts[text] = templates.render(tokenizer, ChatPrompt([{"role": "user", "content": text}]))

    threads = [threading.Thread(target=ask, args=(str(number) * 100_000,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 8 and all(asked == told for asked, told in texts.items())
    process = templates._process
    templates.close()
    templates.close()
    assert process.returncode is not None
    with pytest.raises(BadUsage, match="the session is closed"):
        templates.render(tokenizer, ChatPrompt(TURNS))


def test_an_interruption_ends_the_process(
    templates: ChatTemplates, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its late answer would be taken for the next one's. A process that was killed is started
    again."""
    tokenizer.chat_template = "{{ messages[0].content }}"
    templates.render(tokenizer, ChatPrompt(TURNS))

    def interrupted() -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(templates._process.stdout, "readline", interrupted, raising=False)
        templates.render(tokenizer, ChatPrompt(TURNS))
    assert templates.render(tokenizer, ChatPrompt(TURNS[1:])) == TURNS[1]["content"]
    os.kill(templates._process.pid, 9)
    end = time.monotonic() + 10
    while templates._process.poll() is None:
        assert time.monotonic() < end
    assert templates.render(tokenizer, ChatPrompt(TURNS)) == TURNS[0]["content"]
