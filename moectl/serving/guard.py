"""Access checks before a request reaches the application, and the limits of the server."""

import ipaddress
import re
import secrets
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from artifacts.errors import BadUsage
from moectl.serving.wire import IGNORED, AsciiJson, Refusal, in_dialect

OPEN_PATHS = ("/", "/health")  # the page holds no data
FILES = "/page/"  # nor do its files
OWN_KEY = "x-api-key"
ANY_ORIGIN = "*"
TURNS = 8  # requests at a time that share no pass
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+?)\.?(:[0-9]*)?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """At most `num_rows` requests are answered at a time, in turns or in shared passes of the
    model, None for as many as there is memory for, and `num_waiting` more wait in the queue; an
    answer has at most `max_tokens`, and with its prompt `num_positions`. A connection is closed
    whose request has not arrived in time. Raises BadUsage for values that leave no room for a
    request."""

    num_rows: int | None = TURNS
    shares_passes: bool = False
    num_waiting: int = 64
    max_tokens: int | None = None  # else as many as have room
    num_positions: int | None = None  # of a prompt and its answer, else the model's
    # of prompts kept for their beginnings; None: an eighth of all keys and values
    kept_nbytes: int | None = None
    body_nbytes: int = 4 << 20
    head_s: float = 10.0  # for the line and the headers of a request
    body_s: float = 60.0  # for its body
    # time that running requests have to end after the server is told to stop
    closing_s: float = 30.0

    def __post_init__(self) -> None:
        counts = (self.num_rows, self.max_tokens, self.num_positions)
        if self.num_waiting < 0 or any(count is not None and count < 1 for count in counts):
            raise BadUsage("a server needs room for a request, and answers of at least one token")


@dataclass(frozen=True, slots=True)
class Guard:
    """An ASGI application that checks host name, API key and size of a request before it calls
    `app`.

    `hosts` are the accepted host names, as `host_name` gives them; empty accepts any. A web page in
    a browser can neither call the server by a name that it rebound to this machine, nor from an
    origin of its own, unless `origins` has it, or `*`.
    """

    app: ASGIApp
    api_key: str | None
    hosts: tuple[str, ...]
    body_nbytes: int
    origins: tuple[str, ...] = ()

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
            headers = {"connection": "close", **refusal.headers}
            body = in_dialect(scope["path"], refusal.status, refusal.body())
            answer = AsciiJson(body, refusal.status, headers=headers)
            await answer(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        if self.hosts:
            self._check_names(headers)
        is_open = path in OPEN_PATHS or path.startswith(FILES)
        if self.api_key is not None and not is_open:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if own := headers.get(OWN_KEY):  # Anthropic's clients
                scheme = "bearer"
                key = own
            # as the environment has it, in any encoding
            ours = self.api_key.encode("utf-8", "surrogateescape")
            if scheme.lower() != "bearer" or not secrets.compare_digest(
                key.encode("latin-1"), ours
            ):
                wrong = (
                    "the API key is wrong"
                    if key
                    else "this server wants an API key: send Authorization: Bearer KEY"
                )
                raise Refusal(
                    401, wrong, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
        if int(headers.get("content-length", "0")) > self.body_nbytes:
            raise Refusal(413, self._too_large)

    def _check_names(self, headers: Headers) -> None:
        called = headers.getlist("host")
        origins = headers.getlist("origin")
        if len(called) != 1:
            raise Refusal(
                400, f"a request has one Host header, not {len(called)}: ask for {self.hosts[0]}"
            )
        if host_name(called[0]) not in self.hosts:
            raise Refusal(403, f"this server is not called {called[0]!r}: ask for {self.hosts[0]}")
        for origin in origins:
            if not {origin, ANY_ORIGIN}.isdisjoint(self.origins):
                continue
            if host_name(origin.partition("://")[2]) not in self.hosts:
                raise Refusal(403, f"pages of {origin!r} may not ask this server")

    @property
    def _too_large(self) -> str:
        return f"the request is larger than {self.body_nbytes} bytes"


def guarded(
    app: ASGIApp,
    *,
    api_key: str | None,
    hosts: tuple[str, ...],
    body_nbytes: int,
    origins: tuple[str, ...] = (),
) -> ASGIApp:
    """Return `app` behind a Guard, before which pages of `origins` are answered what a browser asks
    first, without a key."""
    guard = Guard(app, api_key, hosts, body_nbytes, origins)
    if not origins:
        return guard
    return CORSMiddleware(
        guard,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=(ANY_ORIGIN,),
        expose_headers=(IGNORED, "retry-after"),
        allow_private_network=True,
    )


def host_name(authority: str) -> str | None:
    """Return the host of `host` or `host:port` in the form to compare: lower case, no final dot,
    IPv6 in its shortest form within brackets. None for any other text."""
    parts = _AUTHORITY.fullmatch(authority)
    if parts is None:
        return None
    name = parts[1].lower()
    if not name.startswith("["):
        return name
    try:
        return f"[{ipaddress.IPv6Address(name[1:-1])}]"
    except ValueError:
        return None
