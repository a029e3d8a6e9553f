"""Access checks before a request reaches the application, and the limits of the server."""

import json
import secrets
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from artifacts.errors import BadUsage
from moectl.serving.answers import Refusal

OPEN_PATHS = ("/", "/health")  # the page holds no data
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """At most `num_rows` requests are answered at a time and `num_waiting` more wait in the queue; an answer has at
    most `max_tokens`. Raises BadUsage for values that leave no room for a request."""

    num_rows: int = 8
    num_waiting: int = 64
    max_tokens: int = 1024
    body_nbytes: int = 4 << 20
    closing_s: float = 30.0  # time that running requests have to end after the server is told to stop

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.num_waiting < 0 or self.max_tokens < 1:
            raise BadUsage("a server needs room for a request, and answers of at least one token")


@dataclass(frozen=True, slots=True)
class Guard:
    """An ASGI application that checks host name, API key and size of a request before it calls `app`.

    `hosts` are the accepted host names; empty accepts any. The check stops DNS rebinding by web pages in a browser.
    """

    app: ASGIApp
    api_key: str | None
    hosts: tuple[str, ...]
    body_nbytes: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.body_nbytes:
                raise HTTPException(413, self._too_large)
            return message

        try:
            self._check(scope["path"], Headers(scope=scope))
            await self.app(scope, limited, send)
        except Refusal as refusal:
            await _refuse(refusal, send)

    def _check(self, path: str, headers: Headers) -> None:
        host = headers.get("host", "").rpartition(":")
        name = host[0] if host[0] and host[2].isdigit() else headers.get("host", "")
        if self.hosts and name not in self.hosts:
            raise Refusal(403, f"this server is not called {name!r}: ask for {self.hosts[0]}")
        if self.api_key is not None and path not in OPEN_PATHS:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not secrets.compare_digest(key.encode("latin-1"), self.api_key.encode()):
                wrong = (
                    "the API key is wrong" if key else "this server wants an API key: send Authorization: Bearer KEY"
                )
                raise Refusal(401, wrong, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if int(headers.get("content-length", "0")) > self.body_nbytes:
            raise Refusal(413, self._too_large)

    @property
    def _too_large(self) -> str:
        return f"the request is larger than {self.body_nbytes} bytes"


async def _refuse(refusal: Refusal, send: Send) -> None:
    headers = {"content-type": "application/json", "connection": "close", **refusal.headers}
    sent = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": sent})
    await send({"type": "http.response.body", "body": json.dumps(refusal.body()).encode()})
