"""Text received and sent: bodies of requests, and errors in the format of OpenAI's API. Text from a
client can be written again, and text sent breaks no line. Imports no torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any
from unicodedata import category
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from artifacts.common.untrusted import parse_json

_KIND = {
    list: "an array",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}
_ANTHROPIC = "/v1/messages"
_ANTHROPIC_KIND = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_UNSHOWN = (
    "Cc",
    "Cs",
    "Zl",
    "Zp",
)  # controls, halves of a character, ends of a line and of a paragraph
_FIRST_NBYTES = 1 << 16
IGNORED = "x-moectl-ignored"  # the header
_IGNORED = "ignored"  # in the state of a request
_MOST_TOLD = 16
_COMMENTS = "takes_comments"  # in the state of a request
_LONGEST = 80  # characters of a header that are repeated


@dataclass(eq=False)  # not frozen: raising it sets its traceback
class Refusal(Exception):
    """A request that is refused: HTTP status and reason."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        return error(self.status, self.message, param=self.param, code=self.code)


def error(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, object]:
    kind = {429: "rate_limit_error", 401: "authentication_error"}.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def in_dialect(path: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return an error in the format of the API at a path: Anthropic's has one of its own."""
    if not path.startswith(_ANTHROPIC):
        return body
    kind = _ANTHROPIC_KIND.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


class AsciiJson(JSONResponse):
    """JSON response that escapes every character beyond ASCII, and half characters too, which have
    no place in UTF-8."""

    def render(self, content: object) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def shown(text: str) -> str:
    """Return a text without what ends a line or cannot be encoded: that is escaped as in Python."""
    return "".join(
        each.encode("unicode_escape").decode() if category(each) in _UNSHOWN else each
        for each in text
    )


def is_stream(scope: Scope) -> None:
    """Declare that the response to a request is a stream of events, sent as whole events."""
    scope["state"][_COMMENTS] = True


def takes_comments(scope: Scope) -> bool:
    """Return whether a comment may stand between what is sent to a request."""
    return _COMMENTS in scope["state"]


def ignore(scope: Scope, names: Sequence[str]) -> None:
    """Have the answer to a request name options that it ignores."""
    told = [quote(name, safe=".")[:_LONGEST] for name in names]
    more = [f"and {len(told) - _MOST_TOLD} more"] if len(told) > _MOST_TOLD else []
    scope["state"][_IGNORED] = ", ".join(told[:_MOST_TOLD] + more)


@dataclass(frozen=True, slots=True)
class TellsIgnored:
    """An ASGI application that adds the header of ignored options to the answers of `app`."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            names = scope.get("state", {}).get(_IGNORED)
            if names and message["type"] == "http.response.start":
                message["headers"].append((IGNORED.encode(), names.encode()))
            await send(message)

        await self.app(scope, receive, told)


async def object_of(request: Request) -> dict[str, object]:
    """Return the JSON object that is the body of a request. Raises Refusal for any other body, and
    for one with half a character in it, which no answer, page or counter could repeat."""
    with _Body() as body:
        try:
            async for part in request.stream():
                body.add(part)
        except ClientDisconnect:
            raise Refusal(400, "the body ended early") from None
        _check_kind(request, body.nbytes)
        text = body.text()
    found = _parsed(text)
    if not isinstance(found, dict):
        raise Refusal(
            400, f'the body is {_KIND[type(found)]}: send a JSON object, as {{"model": ...}}'
        )
    if "\\u" in text:
        _check_characters(found)
    return found


class _Body:
    """A body that is being read. It lies in memory pages of its own, because the C library gives
    little back to the system from a heap that many bodies have filled."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._held = mmap(-1, _FIRST_NBYTES)

    def __enter__(self) -> "_Body":
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def add(self, part: bytes) -> None:
        end = self.nbytes + len(part)
        if end > len(self._held):
            with self._held as held, memoryview(held) as filled:
                self._held = mmap(-1, 2 * end)
                self._held.write(filled[: self.nbytes])
        self._held.seek(self.nbytes)
        self._held.write(part)
        self.nbytes = end

    def text(self) -> str:
        """Raises Refusal for a body that is not UTF-8."""
        try:
            with memoryview(self._held) as held, held[: self.nbytes] as filled:
                return str(filled, "utf-8-sig")
        except UnicodeDecodeError as error:
            raise Refusal(
                400, f"byte {error.start} of the body is not UTF-8: send JSON in UTF-8"
            ) from None


def _check_kind(request: Request, nbytes: int) -> None:
    encoding, kind = (request.headers.get(f"content-{name}", "") for name in ("encoding", "type"))
    name = kind.partition(";")[0].strip().lower()
    if not nbytes:
        raise Refusal(
            400, "the body is empty: send a JSON object with Content-Type: application/json"
        )
    if encoding.strip().lower() not in ("", "identity"):
        raise Refusal(
            400,
            f"the body is compressed (Content-Encoding: {encoding[:_LONGEST]}): send it as it is",
        )
    if name != "application/json" and not (
        name.startswith("application/") and name.endswith("+json")
    ):
        said = (
            f"the body is said to be {kind[:_LONGEST]}"
            if kind
            else "the body is not said to be JSON"
        )
        raise Refusal(400, f"{said}: send Content-Type: application/json")


def _parsed(text: str) -> object:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise Refusal(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError:
        raise Refusal(
            400, "the body is nested too deeply, or has a number of thousands of digits"
        ) from None


def _check_characters(found: dict[str, object]) -> None:
    for name, value in found.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            name = shown(name)
            message = (
                f"{name}: half a character (as \\ud83d) is no text: cut texts between characters"
            )
            raise Refusal(400, message, param=name) from None
