"""Anthropic's /v1/messages over the chat: its blocks become messages, and pieces of a reply its
blocks."""

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from moectl.serving.api.responses import named_event
from moectl.serving.jobs import Done
from moectl.serving.openai_api import Absent, Count, StrictBody
from moectl.serving.wire import in_dialect
from runtime.session.replies.pieces import (
    ArgumentsPiece,
    CallPiece,
    Piece,
    ReasoningPiece,
    TextPiece,
)
from runtime.session.replies.reply import Reply

Fields = dict[str, Any]
PATH = "/v1/messages"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class Turn(StrictBody):
    role: Literal["user", "assistant", "system"]
    content: str | list[Fields]


class OutputConfig(StrictBody):
    effort: str | None = None
    format: Fields | None = None


class CountBody(StrictBody):
    """What a prompt is made of, whose tokens can be counted."""

    model: str = ""
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[Fields] | None = None
    tools: list[Fields] | None = None
    tool_choice: Fields | None = None
    thinking: Fields | None = None
    output_config: OutputConfig | None = None

    def as_chat(self) -> Fields:
        """Return the body of the chat that asks for the same. Raises ValueError for a block or a
        tool that a chat does not have."""
        messages = [{"role": "system", "content": _text(self.system)}] if self.system else []
        for turn in self.messages:
            messages += _messages(turn)
        asked: Fields = {"model": self.model, "messages": messages}
        if self.tools:
            asked["tools"] = [_tool(tool) for tool in self.tools]
        if self.tool_choice:
            asked |= _choice(self.tool_choice)
        if self.thinking:
            thinks = self.thinking.get("type") != "disabled"
            asked["chat_template_kwargs"] = {"enable_thinking": thinks}
        if self.output_config and self.output_config.effort:
            asked["reasoning_effort"] = self.output_config.effort
        if self.output_config and self.output_config.format:
            named = {"name": "output", "schema": self.output_config.format.get("schema")}
            asked["response_format"] = {"type": "json_schema", "json_schema": named}
        return asked


class MessagesBody(CountBody):
    """A request for a message. `seed` and `ignore_eos` are moectl's own."""

    max_tokens: Count | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0
    metadata: Fields | None = None  # its user_id is whom the counters name
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Absent = None
    mcp_servers: Absent = None
    seed: int | None = None
    ignore_eos: bool = False

    def as_chat(self) -> Fields:
        """Return the body of the chat, as for CountBody."""
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "ignore_eos")
        return super().as_chat() | {
            "stop": self.stop_sequences,
            "user": (self.metadata or {}).get("user_id"),
            **{name: getattr(self, name) for name in same},
        }


def _messages(turn: Turn) -> list[Fields]:
    """Return the messages of a chat that a turn is: the results of tools, and what else it says."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results: list[Fields] = []
    said: Fields = {"role": turn.role, "content": ""}
    for block in turn.content:
        try:
            if block["type"] == "tool_result":
                content = _text(block.get("content") or "")
                results.append(
                    {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
                )
            else:
                _add(block, said)
        except (KeyError, TypeError):
            raise ValueError(f"a {block.get('type')} block needs other fields") from None
    is_empty = not said["content"] and "tool_calls" not in said
    return results if results and is_empty else [*results, said]


def _add(block: Fields, said: Fields) -> None:
    """Add a block to a message."""
    match block["type"]:
        case "text":
            said["content"] += block["text"]
        case "thinking":
            said["reasoning_content"] = said.get("reasoning_content", "") + block["thinking"]
        case "redacted_thinking":
            pass  # another server's, in no language
        case "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            call = {"id": block["id"], "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
        case kind:
            raise ValueError(f"blocks of the type {kind} are not served: send text")


def _text(content: str | list[Fields]) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.get("type") != "text":
            raise ValueError(f"blocks of the type {block.get('type')} are not served: send text")
    return "".join(block["text"] for block in content)


def _tool(tool: Fields) -> Fields:
    if tool.get("type", "custom") != "custom":
        raise ValueError(f"tools of the type {tool['type']} are not served, only functions")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choice(choice: Fields) -> Fields:
    """Return the fields of a chat that say which tools are called."""
    kind = choice.get("type")
    if kind != "tool" and kind not in _CHOICES:
        raise ValueError(f"tool_choice: auto, any, tool or none, not {kind}")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    chosen: Fields = {"tool_choice": named if kind == "tool" else _CHOICES[kind]}
    if choice.get("disable_parallel_tool_use"):
        chosen["parallel_tool_calls"] = False
    return chosen


@dataclass(slots=True)
class MessageFormat:
    """Formats one message; `model` is the name that clients use."""

    model: str
    num_prompt_tokens: int
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")
    _num_blocks: int = 0
    _open: str | None = None  # the type of the block

    def whole(self, reply: Reply, done: Done) -> Fields:
        """Return the message as one object."""
        blocks: list[Fields] = []
        if reply.reasoning:
            blocks.append(_block(ReasoningPiece("")) | {"thinking": reply.reasoning})
        if reply.text or not (reply.reasoning or reply.calls):
            blocks.append(_block(TextPiece("")) | {"text": reply.text})
        for index, call in enumerate(reply.calls):
            block = _block(CallPiece(index, call.id, call.name))
            blocks.append(block | {"input": _object(call.arguments)})
        usage = self._usage(done.num_cached) | {"output_tokens": done.num_tokens}
        return self._message() | _ended(done) | {"content": blocks, "usage": usage}

    def begins(self) -> str:
        """The event before any block."""
        return _event("message_start", message=self._message())

    def goes_on(self, piece: Piece) -> str:
        """The events of one piece."""
        return "".join(self._took(piece))

    def ends(self, done: Done) -> list[str]:
        """The events after the last piece."""
        usage = self._usage(done.num_cached) | {"output_tokens": done.num_tokens}
        return [
            *self._close(),
            _event("message_delta", delta=_ended(done), usage=usage),
            _event("message_stop"),
        ]

    def fails(self, message: str, status: int) -> str:
        """The event of a failure in the midst."""
        return named_event("error", in_dialect(PATH, status, {"error": {"message": message}}))

    def _took(self, piece: Piece) -> Iterator[str]:
        kind = _type(piece)
        if kind != self._open or isinstance(piece, CallPiece):
            yield from self._close()
            self._open = kind
            self._num_blocks += 1
            yield self._of_block("content_block_start", content_block=_block(piece))
        if not isinstance(piece, CallPiece):
            yield self._of_block("content_block_delta", delta=_delta(piece))

    def _close(self) -> Iterator[str]:
        if self._open:
            self._open = None
            yield self._of_block("content_block_stop")

    def _of_block(self, kind: str, **fields: object) -> str:
        return _event(kind, index=self._num_blocks - 1, **fields)

    def _message(self) -> Fields:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(0) | {"output_tokens": 0},
        }

    def _usage(self, num_cached: int) -> Fields:
        return {
            "input_tokens": self.num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
        }


def _ended(done: Done) -> Fields:
    reason = "stop_sequence" if done.stop is not None else _REASONS[done.reason]
    return {"stop_reason": reason, "stop_sequence": done.stop}


def _type(piece: Piece) -> str:
    match piece:
        case TextPiece():
            return "text"
        case ReasoningPiece():
            return "thinking"
        case CallPiece() | ArgumentsPiece():
            return "tool_use"


def _block(piece: Piece) -> Fields:
    match piece:
        case CallPiece(_, id, name):
            return {"type": "tool_use", "id": id, "name": name, "input": {}}
        case ReasoningPiece():
            return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(piece: Piece) -> Fields:
    match piece:
        case ReasoningPiece(text):
            return {"type": "thinking_delta", "thinking": text}
        case ArgumentsPiece(_, text):
            return {"type": "input_json_delta", "partial_json": text}
    return {"type": "text_delta", "text": piece.text}


def _object(arguments: str) -> object:
    """Return the arguments of a call as an object; as a text where a cut has left no JSON."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def _event(kind: str, **fields: object) -> str:
    return named_event(kind, {"type": kind, **fields})
