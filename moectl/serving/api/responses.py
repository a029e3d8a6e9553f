"""OpenAI's /v1/responses over the chat: its items become messages, and pieces of a reply its items.
Nothing is stored, so a conversation is sent whole."""

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from moectl.serving.jobs import Done
from moectl.serving.openai_api import Absent, Count, StrictBody
from runtime.session.replies.pieces import (
    ArgumentsPiece,
    CallPiece,
    Piece,
    ReasoningPiece,
    TextPiece,
)
from runtime.session.replies.reply import Reply

Fields = dict[str, Any]
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
_ID_OF = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # with which ids begin
# the type of an item's part, with which its events' names begin
_PART_OF = {"message": "output_text", "reasoning": "reasoning_text"}


def _unstored(given: object) -> None:
    if given is not None:
        raise ValueError("nothing is stored here: send the whole conversation as input")


Unstored = Annotated[None, PlainValidator(_unstored)]


class Reasoning(StrictBody):
    effort: str | None = None
    summary: str | None = None  # there is no other text than the reasoning itself
    generate_summary: str | None = None


class Text(StrictBody):
    format: Fields | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(StrictBody):
    """A request for a response. `seed`, `top_k` and `ignore_eos` are moectl's own."""

    model: str = ""
    input: str | list[Fields]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[Fields] | None = None
    tool_choice: str | Fields | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    user: str | None = None
    previous_response_id: Unstored = None
    conversation: Unstored = None
    prompt: Absent = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Ignored: they do not change an answer. It says that it is not stored.
    store: bool | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    max_tool_calls: int | None = None  # of tools that OpenAI runs
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    stream_options: Fields | None = None
    seed: int | None = None
    top_k: int = 0
    ignore_eos: bool = False

    def as_chat(self) -> Fields:
        """Return the body of the chat that asks for the same. Raises ValueError for an item, a tool
        or a format that a chat does not have."""
        said = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = self.input
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        asked: Fields = {"model": self.model, "messages": said + _messages(items)}
        same = ("temperature", "top_p", "stream", "parallel_tool_calls", "user")
        asked |= {name: getattr(self, name) for name in (*same, "seed", "top_k", "ignore_eos")}
        asked["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            asked["tools"] = [_tool(tool) for tool in self.tools]
        if self.tool_choice is not None:
            asked["tool_choice"] = _choice(self.tool_choice)
        if self.text and self.text.format:
            asked["response_format"] = _format(self.text.format)
        if self.reasoning and self.reasoning.effort:
            asked["reasoning_effort"] = self.reasoning.effort
        return asked


def _messages(items: list[Fields]) -> list[Fields]:
    """Return the messages of a chat. What an assistant thinks, says and calls is one message."""
    messages: list[Fields] = []
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        try:
            role, fields = _said(kind, item)
        except (KeyError, TypeError):
            raise ValueError(f"input.{number}: a {kind} needs other fields") from None
        last = messages[-1] if messages else {"role": None}
        if role == "assistant" == last["role"] and not last.keys() & fields.keys() - {"tool_calls"}:
            fields["tool_calls"] = last.get("tool_calls", []) + fields.get("tool_calls", [])
            last |= {name: value for name, value in fields.items() if value}
        else:
            messages.append({"role": role} | fields)
    for message in messages:
        message.setdefault("content", None if message.get("tool_calls") else "")
    return messages


def _said(kind: str, item: Fields) -> tuple[str, Fields]:
    """Return the role and the other fields of the message that an item is or is a part of."""
    match kind:
        case "message":
            return item["role"], {"content": _text(item["content"])}
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            return "assistant", {"reasoning_content": _text(parts)}
        case "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            return "assistant", {"tool_calls": [call]}
        case "function_call_output":
            output = {"tool_call_id": item["call_id"], "content": _text(item["output"])}
            return "tool", output
    raise ValueError(f"items of the type {kind} are not served: leave them out")


def _text(content: str | list[Fields]) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part["type"] not in _TEXTS:
            raise ValueError(f"parts of the type {part['type']} are not served: send text")
    return "".join(part.get("text") or part.get("refusal", "") for part in content)


def _tool(tool: Fields) -> Fields:
    if tool.get("type") != "function":
        raise ValueError(f"tools of the type {tool.get('type')} are not served, only functions")
    names = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


def _choice(choice: str | Fields) -> str | Fields:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise ValueError(f"tool_choice: {choice.get('type')} is not served: name a function")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _format(given: Fields) -> Fields:
    if given.get("type") != "json_schema":
        return given
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in given.items() if name != "type"},
    }


@dataclass(slots=True)
class ResponseFormat:
    """Formats one response; `items` are those so far, of which the last may be open."""

    asked: ResponsesBody
    model: str
    num_prompt_tokens: int
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(24)}")
    created: float = field(default_factory=lambda: float(int(time.time())))
    items: list[Fields] = field(default_factory=list)
    _num_events: int = 0
    _is_open: bool = False

    def whole(self, reply: Reply, done: Done) -> Fields:
        """Return the response as one object."""
        if reply.reasoning:
            self._begin(ReasoningPiece(""))
            self._add(reply.reasoning)
        if reply.text or not reply.calls:
            self._begin(TextPiece(""))
            self._add(reply.text)
        for index, call in enumerate(reply.calls):
            self._begin(CallPiece(index, call.id, call.name))
            self._add(call.arguments)
        return self._ended(done)

    def begins(self) -> str:
        """The events before any item."""
        return "".join(
            self._event(f"response.{name}", response=self._response("in_progress"))
            for name in ("created", "in_progress")
        )

    def goes_on(self, piece: Piece) -> str:
        """The events of one piece."""
        return "".join(self._took(piece))

    def ends(self, done: Done) -> list[str]:
        """The events after the last piece."""
        last = list(self._close())
        response = self._ended(done)
        return [*last, self._event(f"response.{response['status']}", response=response)]

    def fails(self, message: str, status: int) -> str:
        """The event of a failure in the midst."""
        failed = self._response("failed") | {"error": {"code": "server_error", "message": message}}
        return self._event("response.failed", response=failed)

    def _took(self, piece: Piece) -> Iterator[str]:
        is_same = self._is_open and self.items[-1]["type"] == _kind(piece)
        if not is_same or isinstance(piece, CallPiece):
            yield from self._close()
            yield from self._open(piece)
        if isinstance(piece, CallPiece):
            return
        self._add(piece.text)
        name = _events_of(self.items[-1])
        yield self._event(f"response.{name}.delta", **self._place(), delta=piece.text)

    def _begin(self, piece: Piece) -> None:
        """Add the item that begins with a piece."""
        kind = _kind(piece)
        item: Fields = {"id": f"{_ID_OF[kind]}_{secrets.token_hex(24)}", "type": kind}
        match piece:
            case CallPiece(_, id, name):
                item |= {"call_id": id, "name": name, "arguments": ""}
            case TextPiece():
                item |= {"role": "assistant", "content": [_part("message")]}
            case ReasoningPiece():
                item |= {"summary": [], "content": [_part("reasoning")]}
        self.items.append(item | {"status": "in_progress"})

    def _add(self, text: str) -> None:
        """Add text to the last item."""
        item = self.items[-1]
        if item["type"] == "function_call":
            item["arguments"] += text
        else:
            item["content"][0]["text"] += text

    def _open(self, piece: Piece) -> Iterator[str]:
        self._begin(piece)
        self._is_open = True
        item = self.items[-1]
        index = len(self.items) - 1
        bare = item | {"content": []} if "content" in item else item
        yield self._event("response.output_item.added", output_index=index, item=bare)
        if "content" in item:
            part = _part(item["type"])
            yield self._event("response.content_part.added", **self._place(), part=part)

    def _close(self) -> Iterator[str]:
        """The last events of the open item."""
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        item["status"] = "completed"
        name = _events_of(item)
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event(f"response.{name}.done", **self._place(), **done)
        else:
            part = item["content"][0]
            yield self._event(f"response.{name}.done", **self._place(), text=part["text"])
            yield self._event("response.content_part.done", **self._place(), part=part)
        yield self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _place(self) -> Fields:
        """Return the place of the last item, and of its part."""
        item = self.items[-1]
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if item["type"] == "function_call":
            return place
        logprobs = {"logprobs": []} if item["type"] == "message" else {}
        return place | {"content_index": 0} | logprobs

    def _ended(self, done: Done) -> Fields:
        is_cut = done.reason == "length"
        for item in self.items:
            item["status"] = "completed"
        if is_cut and self.items:
            self.items[-1]["status"] = "incomplete"
        response = self._response("incomplete" if is_cut else "completed")
        cut = {"reason": "max_output_tokens"} if is_cut else None
        return response | {
            "incomplete_details": cut,
            "usage": {
                "input_tokens": self.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": done.num_cached},
                "output_tokens": done.num_tokens,
                "output_tokens_details": {"reasoning_tokens": done.num_reasoning},
                "total_tokens": self.num_prompt_tokens + done.num_tokens,
            },
        }

    def _response(self, status: str) -> Fields:
        asked = self.asked
        reasoning = asked.reasoning
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self.model,
            "output": self.items,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
        }

    def _event(self, kind: str, **fields: object) -> str:
        numbered = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return named_event(kind, numbered)


def named_event(kind: str, body: Mapping[str, object]) -> str:
    """Return a server-sent event with its name, in ASCII."""
    return f"event: {kind}\ndata: {json.dumps(body)}\n\n"


def _kind(piece: Piece) -> str:
    match piece:
        case TextPiece():
            return "message"
        case ReasoningPiece():
            return "reasoning"
        case CallPiece() | ArgumentsPiece():
            return "function_call"


def _events_of(item: Fields) -> str:
    return _PART_OF.get(item["type"], "function_call_arguments")


def _part(kind: str) -> Fields:
    part: Fields = {"type": _PART_OF[kind], "text": ""}
    return part | {"annotations": [], "logprobs": []} if kind == "message" else part
