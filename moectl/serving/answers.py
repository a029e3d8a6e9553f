"""Answers in the format of OpenAI's API."""

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from moectl.serving.api.choices import AnswerChoice
from moectl.serving.api.logprobs import CompletionLog, of_chat
from moectl.serving.jobs import Done, LoggedToken, TokenCost
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
class OneAnswer:
    """Formats the one choice of a request by a form of one answer."""

    form: Form

    def whole(self, choices: Sequence[AnswerChoice]) -> dict[str, object]:
        return self.form.whole(choices[0].reply, choices[0].done)

    def begins(self) -> Iterator[str]:
        if begin := self.form.begins():
            yield begin

    def goes_on(self, index: int, piece: Piece, tokens: Sequence[LoggedToken] = ()) -> str:
        return self.form.goes_on(piece)

    def ends(self, index: int, done: Done, tokens: Sequence[LoggedToken] = ()) -> str:
        return "".join(self.form.ends(done))

    def closes(self, dones: Sequence[Done]) -> Iterator[str]:
        return iter(())

    def fails(self, message: str, status: int) -> str:
        return self.form.fails(message, status)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Formats the answers to a chat or to bare prompts; `model` is the name that clients use.
    `echoes` has the text that stands before the text of each choice."""

    is_chat: bool
    model: str
    num_prompt_tokens: int
    has_usage: bool
    has_counters: bool
    echoes: tuple[str, ...] = ("",)
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    _logs: dict[int, CompletionLog] = field(default_factory=dict)

    def whole(self, choices: Sequence[AnswerChoice]) -> dict[str, object]:
        """The body of all choices. Counters stand beside the one choice, or in each of several."""
        said = [
            self._choice(
                index,
                {"message": _message(one.reply)}
                if self.is_chat
                else {"text": self.echoes[index] + one.reply.text},
                one.done.reason,
                one.tokens,
            )
            | (self._took(one.done, one.costs) if len(choices) > 1 else {})
            for index, one in enumerate(choices)
        ]
        dones = [one.done for one in choices]
        body = self._body("chat.completion", said) | {"usage": self._usage(dones)}
        return body | (self._took(dones[0], choices[0].costs) if len(choices) == 1 else {})

    def begins(self) -> Iterator[str]:
        """The events before any text; a completion has them for echoes only."""
        for index, echo in enumerate(self.echoes):
            if self.is_chat:
                yield self._chunk(index, {"role": "assistant", "content": ""})
            elif echo:
                yield self._chunk(index, echo)

    def goes_on(self, index: int, piece: Piece, tokens: Sequence[LoggedToken] = ()) -> str:
        """The event of one piece of a choice, with its tokens; that of a completion is text."""
        return self._chunk(index, _delta(piece) if self.is_chat else piece.text, tokens=tokens)

    def costs(self, index: int, cost: TokenCost) -> str:
        """The event of what a token of a choice took."""
        took = {"moectl": {"token": asdict(cost)}}
        return self._chunk(index, {} if self.is_chat else "", took=took)

    def ends(self, index: int, done: Done, tokens: Sequence[LoggedToken] = ()) -> str:
        """The event after the text of a choice, with counters if the request asked for them and
        usage does not follow."""
        is_last = self.has_usage and len(self.echoes) == 1
        took = {} if is_last else self._took(done)
        return self._chunk(index, {} if self.is_chat else "", done.reason, tokens, took)

    def closes(self, dones: Sequence[Done]) -> Iterator[str]:
        """The events after all choices, with usage if the request asked for it."""
        if self.has_usage:
            took = self._took(dones[0]) if len(dones) == 1 else {}
            used = self._body("chat.completion.chunk", []) | {"usage": self._usage(dones)} | took
            yield event(used)
        yield "data: [DONE]\n\n"

    def fails(self, message: str, status: int) -> str:
        """The event of a failure in the midst."""
        return event(error(status, message))

    def _chunk(
        self,
        index: int,
        said: dict[str, object] | str,
        reason: str | None = None,
        tokens: Sequence[LoggedToken] = (),
        took: dict | None = None,
    ) -> str:
        choice = self._choice(
            index, {"delta": said} if self.is_chat else {"text": said}, reason, tokens
        )
        usage = {"usage": None} if self.has_usage else {}
        return event(self._body("chat.completion.chunk", [choice]) | usage | (took or {}))

    def _choice(
        self,
        index: int,
        said: dict[str, object],
        reason: str | None,
        tokens: Sequence[LoggedToken],
    ) -> dict[str, object]:
        logprobs = self._logprobs(index, tokens) if tokens else None
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, tokens: Sequence[LoggedToken]) -> dict[str, object]:
        return (
            of_chat(tokens)
            if self.is_chat
            else self._logs.setdefault(index, CompletionLog()).add(tokens)
        )

    def _body(self, kind: str, choices: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": f"chatcmpl-{self.id}" if self.is_chat else f"cmpl-{self.id}",
            "object": kind if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _usage(self, dones: Sequence[Done]) -> dict[str, object]:
        num_tokens = sum(done.num_tokens for done in dones)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self.num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached(dones)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(done.num_reasoning for done in dones)
            },
        }

    def _num_cached(self, dones: Sequence[Done]) -> int:
        """Of all choices, as many as were computed once for all."""
        return min(sum(done.num_cached for done in dones), self.num_prompt_tokens)

    def _took(self, done: Done, costs: Sequence[TokenCost] = ()) -> dict[str, object]:
        """What an answer took: its drafts as llama.cpp tells them, if it had any, and counters if
        the request asked for them."""
        drafts = {"draft_n": done.num_drafted, "draft_n_accepted": done.num_accepted}
        took = {"timings": drafts} if done.num_drafted else {}
        if not self.has_counters:
            return took
        by_token = {"by_token": [asdict(cost) for cost in costs]} if costs else {}
        return took | {"moectl": done.took | by_token}


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
