"""Replies are taken apart by the kinds that the chat template tells: however their text is cut, the
pieces are those of the whole, and what is malformed ends as text or as text of arguments."""

import json
import re
import time
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_template_utils import render_jinja_template

from artifacts.errors import BadUsage, Incompatible
from runtime.session.replies.form import ReplyForm, form_of
from runtime.session.replies.pieces import ArgumentsPiece, CallPiece, Piece
from runtime.session.replies.registry import CALLS, Context, known_kinds, reply_kind
from runtime.session.replies.reply import Reply
from tests import ROOT
from tests.helpers.outside import package

TEMPLATES = {
    path.stem: path.read_text() for path in (ROOT / "tests" / "data" / "replies").iterdir()
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "hours": {"type": ["array", "null"], "items": {"type": "number"}},
                    "unit": {"enum": ["C", "F"]},
                    "at": {"properties": {"zip": {"type": "string"}}},
                },
            },
        },
    }
    for name in ("weather", "say")
]
CITY = 'K"öln\\ \n</p>{'
ASKED = {"city": CITY, "days": 3, "hours": [1.5, 2], "unit": "C"}
JSON = json.dumps(ASKED, ensure_ascii=False)
CALLED = [
    {"id": f"functions.{name}:{index}", "type": "function"}
    | {"function": {"name": name, "arguments": given}}
    for index, (name, given) in enumerate([("weather", ASKED), ("say", {"city": "x"})])
]
ENDS = (
    "<|im_end|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "[e~[",
    "<turn|>",
    "<|eot_id|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end_of_text|>",
)
KINDS = {
    "qwen3": "think hermes",
    "qwen3_coder": "think qwen_xml",
    "glm": "think glm",
    "deepseek_v31": "think deepseek",
    "deepseek_v3": "deepseek",
    "deepseek_v4": "think dsml",
    "kimi": "think kimi",
    "mistral": "mistral_think mistral",
    "mistral_v3": "mistral",
    "minimax_m2": "think minimax",
    "minimax_m3": "mm_think minimax_m3",
    "gemma4": "gemma_thought gemma",
    "gpt_oss": "harmony",
    "llama3": "llama",
    "lfm2": "lfm",
    "command_a": "cohere_thinking cohere",
    "granite": "granite",
    "hunyuan": "hunyuan",
}
SILENT = ["deepseek_v3", "mistral_v3", "llama3", "lfm2", "granite", "hunyuan"]  # which do not think
BRIEF = ["mistral_v3", "llama3"]  # which do not speak and call in one reply
THOUGHT = "Hm <b>\n\nso"
SAID = "I look\n now."
OPEN = [
    r"{[",
    '["',
    '"',
    "\\",
    "{",
    "}",
    "\n",
    " ",
    "text",
    '"name": ',
    "```json",
    "to=f",
    "<think>",
]


def rendered(name: str, turns: list[dict], *, asks: bool) -> str:
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    asked = {"tools": TOOLS, "chat_template": TEMPLATES[name], "add_generation_prompt": asks}
    [text], _ = render_jinja_template([turns], **asked, **ends)
    return text


@cache
def written(name: str) -> tuple[str, str]:
    """A prompt, and a reply to it as the template writes one with two calls."""
    turns = [{"role": "user", "content": "hi"}]
    called = json.loads(json.dumps(CALLED))
    if name == "deepseek_v3":  # which takes a text
        for call in called:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    said = {"role": "assistant", "content": None if name in BRIEF else SAID, "tool_calls": called}
    thought = {} if name in SILENT else {"reasoning_content": THOUGHT}
    prompt = rendered(name, turns, asks=True)
    whole = rendered(name, [*turns, said | thought], asks=False)
    assert whole.startswith(prompt)
    return prompt, re.split("|".join(map(re.escape, ENDS)), whole.removeprefix(prompt))[0]


def form(name: str, prompt_end: str | None = None) -> ReplyForm:
    end = written(name)[0] if prompt_end is None else prompt_end
    return form_of(TEMPLATES[name], prompt_end=end, tools=TOOLS)


def pieces(of: ReplyForm, *texts: str) -> list[Piece]:
    parser = of.parser()
    return [piece for text in texts for piece in parser.add(text)] + parser.rest()


def joined(found: list[Piece]) -> list[tuple]:
    """Pieces in order, those of one text together, without the ids of calls."""
    parts: list[tuple] = []
    for piece in found:
        if isinstance(piece, CallPiece):
            parts.append((CallPiece, piece.index, piece.name))
            continue
        one = type(piece), piece.index if isinstance(piece, ArgumentsPiece) else None
        if parts and parts[-1][:2] == one:
            parts[-1] = (*one, parts[-1][2] + piece.text)
        else:
            parts.append((*one, piece.text))
    return parts


@pytest.mark.parametrize("name", KINDS)
def test_what_a_template_writes_is_read_again(name: str) -> None:
    of = form(name)
    text = written(name)[1]
    assert [kind.name for kind in of.kinds] == KINDS[name].split()
    found = pieces(of, text)
    reply = Reply.of(found)
    thought = "" if name in SILENT else THOUGHT
    assert (reply.reasoning, reply.text) == (thought, "" if name in BRIEF else SAID)
    calls = [(call.name, json.loads(call.arguments)) for call in reply.calls]
    assert calls == [("weather", ASKED), ("say", {"city": "x"})]
    assert len({call.id for call in reply.calls}) == 2
    for cut in range(0, len(text), 7):
        assert joined(pieces(of, text[:cut], text[cut:])) == joined(found)
    assert joined(pieces(of, *text)) == joined(found)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_cut_changes_the_pieces_of_a_malformed_reply(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(KINDS)))
    of = form(name, data.draw(st.sampled_from(["", "<think>\n"])))
    parts = re.findall(r"<[^<>]*>|[^<>]+|.", written(name)[1], re.DOTALL)
    drawn = st.lists(st.sampled_from([*parts, *sorted(of.markers), *OPEN]), max_size=14)
    text = "".join(data.draw(drawn))
    assert joined(pieces(of, *text)) == joined(pieces(of, text))


@pytest.mark.parametrize(
    ("name", "family"),
    [("qwen3", "qwen3_moe"), ("qwen3_coder", "qwen3_5_moe"), ("gemma4", "gemma4")],
)
def test_replies_are_read_as_transformers_reads_them(name: str, family: str) -> None:
    known = {one: spec for kinds, spec in _RESPONSE_TEMPLATE_FALLBACKS.items() for one in kinds}
    prompt, text = written(name)
    expected = parse_response(text, known[family], prefix=prompt, tools=TOOLS)
    reply = Reply.of(pieces(form(name), text))
    assert (reply.text, reply.reasoning) == (expected["content"], expected["reasoning_content"])
    calls = [{"name": one.name, "arguments": json.loads(one.arguments)} for one in reply.calls]
    assert calls == [one["function"] for one in expected["tool_calls"]]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("qwen3", "<think>a", ("", "a", [])),
        ("qwen3", "\n a <think>b</think>", ("\n a <think>b</think>", "", [])),
        ("qwen3", "a <tool_call>b</tool_call> c", ("a <tool_call>b</tool_call> c", "", [])),
        ("qwen3", '<tool_call>{"name": "f", "arguments": {"a": "b', ("", "", [("f", '{"a": "b')])),
        ("qwen3", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', ("", "", [("f", '{"a": 1}')])),
        ("qwen3", '<tool_call>{"name": "f"}</tool_call>\n', ("", "", [("f", "{}")])),
        ("qwen3", '<tool_call>{"name": "f", "arguments": "x"}', ("", "", [("f", "x")])),
        (
            "qwen3",
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>b',
            ("b", "", [("f", '{"a": "</tool_call>"}')]),
        ),
        (
            "qwen3",
            '<tool_call>{"name": "f", "arguments": {"a": "b}\n</tool_call>c',
            ("c", "", [("f", '{"a": "b}\n')]),
        ),
        ("llama3", '{"a": 1}', ('{"a": 1}', "", [])),
        (
            "qwen3_coder",
            "b</think><tool_call><function=say><parameter=city>a",
            ("", "b", [("say", '{"city": "a')]),
        ),
        (
            "qwen3_coder",
            "</think><tool_call><function=f><parameter=a>\n[1]\n</parameter><parameter=b>\nc d\n"
            "</parameter></function></tool_call>",
            ("", "", [("f", '{"a": [1], "b": "c d"}')]),
        ),
        ("kimi", "<think>a<|tool_calls_section_begin|>b", ("b", "a", [])),
        ("gpt_oss", "plain", ("plain", "", [])),
        (
            "gpt_oss",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.f<|channel|>"
            "commentary json<|message|>{}<|call|>",
            ("", "a", [("f", "{}")]),
        ),
        ("deepseek_v31", "a</think>b<｜tool▁call▁end｜>", ("b<｜tool▁call▁end｜>", "a", [])),
    ],
)
def test_what_is_malformed_stays(name: str, text: str, expected: tuple) -> None:
    reply = Reply.of(pieces(form(name), text))
    calls = [(call.name, call.arguments) for call in reply.calls]
    assert (reply.text, reply.reasoning, calls) == expected


def test_calls_are_looked_for_where_there_are_tools_and_one_kind_suits() -> None:
    template = TEMPLATES["qwen3"]
    assert [kind.name for kind in form_of(template, prompt_end="").kinds] == ["think"]
    both = template + TEMPLATES["kimi"]
    assert [kind.name for kind in form_of(both, prompt_end="", tools=TOOLS).kinds] == ["think"]
    assert form_of("{{ messages }}", prompt_end="", tools=TOOLS) == ReplyForm(
        context=Context("", form("kimi").context.tools)
    )


_SHOUT = """from runtime.session.replies.pieces import CallPiece
from runtime.session.replies.registry import CALLS, reply_kind


@reply_kind("shout", CALLS, signs=("!!",))
def shout(source, context):
    yield from source.pass_upto("!!")
    yield CallPiece(0, "id", "shout")


def whisper(source, context):
    yield from source.pass_upto()
"""
_ENTRY = '[project.entry-points."moectl.replies"]\n{0} = "shouting:{0}"\n'


def test_another_package_adds_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.session.replies.registry._KINDS", dict(known_kinds()))
    with package(tmp_path, "shouting", _SHOUT, _ENTRY.format("shout")):
        found = pieces(form_of("say !!", prompt_end="", tools=TOOLS), "a !", "! b")
        assert Reply.of(found).text == "a" and found[-1] == CallPiece(0, "id", "shout")
    with pytest.raises(BadUsage, match="it is taken"):
        reply_kind("hermes", CALLS, signs=("",))(lambda source, context: iter(()))
    (tmp_path / "other").mkdir()
    with (
        package(
            tmp_path / "other", "shouting", _SHOUT.replace("shout", "cry"), _ENTRY.format("whisper")
        ),
        pytest.raises(Incompatible, match="it registers no whisper by reply_kind"),
    ):
        known_kinds()


@pytest.mark.parametrize("name", KINDS)
def test_huge_and_deep_replies_take_linear_time(name: str) -> None:
    """Thirty thousand characters in one piece, and many; a quadratic parser takes minutes."""
    began = time.process_time()
    of = form(name)
    text = written(name)[1]
    for part in ("\n", "{", "<", "".join(sorted(of.markers)), text):
        parser = of.parser()
        cut = text.find(CITY[:2]) if part in "\n{<" else 0  # within arguments, and from the begin
        for piece in (text[:cut], part * (30_000 // len(part)), *([part] * 200)):
            parser.add(piece)
        parser.rest()
    assert time.process_time() - began < 4
