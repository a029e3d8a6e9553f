"""Answers in the format of OpenAI's API."""

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Protocol

from moectl.serving.jobs import Done
from moectl.serving.wire import error
from runtime.session.replies.pieces import (
    ArgumentsPiece,
    CallPiece,
    Piece,
    ReasoningPiece,
    TextPiece,
)
from runtime.session.replies.reply import Reply


class Form(Protocol):
    """The format of one answer in one of the APIs: whole, or as the text of events."""

    def whole(self, reply: Reply, done: Done) -> dict[str, object]: ...

    def begins(self) -> str | None: ...

    def goes_on(self, piece: Piece) -> str: ...

    def ends(self, done: Done) -> list[str]: ...

    def fails(self, message: str, status: int) -> str: ...


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Formats one answer to a chat or to a bare prompt; `model` is the name that clients use."""

    is_chat: bool
    model: str
    num_prompt_tokens: int
    has_usage: bool
    has_counters: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, reply: Reply, done: Done) -> dict[str, object]:
        said = {"message": _message(reply)} if self.is_chat else {"text": reply.text}
        body = self._body("chat.completion", self._choice(said, done.reason))
        return body | {"usage": self._usage(done)} | self._took(done)

    def begins(self) -> str | None:
        """The event before any text; a completion has none."""
        return self._chunk({"role": "assistant", "content": ""}) if self.is_chat else None

    def goes_on(self, piece: Piece) -> str:
        """The event of one piece; that of a completion is text."""
        return self._chunk(_delta(piece) if self.is_chat else piece.text)

    def ends(self, done: Done) -> list[str]:
        """The events after the text, with usage and counters if the request asked for them."""
        took = self._took(done)
        empty = {} if self.is_chat else ""
        last = self._chunk(empty, done.reason, {} if self.has_usage else took)
        if not self.has_usage:
            return [last, "data: [DONE]\n\n"]
        used = self._body("chat.completion.chunk", None) | {"usage": self._usage(done)} | took
        return [last, event(used), "data: [DONE]\n\n"]

    def fails(self, message: str, status: int) -> str:
        """The event of a failure in the midst."""
        return event(error(status, message))

    def _chunk(
        self, said: dict[str, object] | str, reason: str | None = None, took: dict | None = None
    ) -> str:
        choice = self._choice({"delta": said} if self.is_chat else {"text": said}, reason)
        usage = {"usage": None} if self.has_usage else {}
        return event(self._body("chat.completion.chunk", choice) | usage | (took or {}))

    def _choice(self, said: dict[str, object], reason: str | None) -> dict[str, object]:
        return {"index": 0, **said, "logprobs": None, "finish_reason": reason}

    def _body(self, kind: str, choice: dict[str, object] | None) -> dict[str, object]:
        return {
            "id": f"chatcmpl-{self.id}" if self.is_chat else f"cmpl-{self.id}",
            "object": kind if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [] if choice is None else [choice],
        }

    def _usage(self, done: Done) -> dict[str, object]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": done.num_tokens,
            "total_tokens": self.num_prompt_tokens + done.num_tokens,
            "prompt_tokens_details": {"cached_tokens": done.num_cached},
        }

    def _took(self, done: Done) -> dict[str, object]:
        return {"moectl": done.took} if self.has_counters else {}


def _message(reply: Reply) -> dict[str, object]:
    content = None if reply.calls and not reply.text else reply.text
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            _call(one.id, {"name": one.name, "arguments": one.arguments}) for one in reply.calls
        ]
    return message


def _delta(piece: Piece) -> dict[str, object]:
    match piece:
        case TextPiece(text):
            return {"content": text}
        case ReasoningPiece(text):
            return {"reasoning_content": text}
        case CallPiece(index, id, name):
            begun = {"index": index} | _call(id, {"name": name, "arguments": ""})
            return {"tool_calls": [begun]}
        case ArgumentsPiece(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _call(id: str, function: dict[str, str]) -> dict[str, object]:
    return {"id": id, "type": "function", "function": function}


def event(body: dict[str, object]) -> str:
    """One server-sent event. It is ASCII: many clients split lines as Python does, also at U+2028
    and U+0085."""
    return f"data: {json.dumps(body)}\n\n"
