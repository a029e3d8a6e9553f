"""Connections of the server: a request arrives in time, and a client that has closed its side still
gets its answer.

A request that is sent by halves would hold memory and a place for ever.

A client that has closed its side may wait for the answer, or be gone. Both cases look the same
until the server sends something, because TCP signals the end of a client's data in either case. A
client that has gone answers with a reset. So the server sends something that a waiting client
ignores: an interim response before the answer (RFC 9110, 15.2), a comment within a stream of
events.
"""

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from moectl.serving.guard import ServerLimits
from moectl.serving.wire import error, takes_comments

# a reset arrives after one round trip
_FIRST_S = 0.02
_PROBE_S = 1.0


class TimelyProtocol(H11Protocol):
    """HTTP by h11 for uvicorn; a request whose head or body has not arrived in the time of `limits`
    gets status 408, and its connection is closed."""

    def __init__(self, *args: object, limits: ServerLimits, **own: object) -> None:
        super().__init__(*args, **own)
        self._limits = limits
        # the state of what the client sends, and its request
        self._awaited: tuple[object, object] | None = None
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: object) -> None:
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        # begins with the next request, if the client sent several at once
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Count the time anew where the client has something else to send than before."""
        awaited = (self.conn.their_state, self.cycle)
        if awaited == self._awaited:
            return
        self._stop_watching()
        self._awaited = awaited
        if self.transport.is_closing():
            return
        limits = {
            h11.IDLE: ("head", self._limits.head_s),
            h11.SEND_BODY: ("body", self._limits.body_s),
        }
        if awaited[0] in limits:
            what, limit_s = limits[awaited[0]]
            self._late = self.loop.call_later(limit_s, self._give_up, what, limit_s)

    def _stop_watching(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self, what: str, limit_s: float) -> None:
        if self.transport.is_closing():
            return
        is_begun = what == "body" or bool(self.conn.trailing_data[0])
        if is_begun and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._say(
                408, f"the {what} of the request did not arrive within {limit_s:g} s: send it again"
            )
        if self.cycle is not None and what == "body":
            self.cycle.disconnected = True  # the application has nothing more to say
            self.cycle.message_event.set()
        self.transport.close()

    def _say(self, status: int, message: str) -> None:
        body = json.dumps(error(status, message)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        said = (
            h11.Response(status_code=status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        for event in said:
            self.transport.write(self.conn.send(event))


class HalfClosedProtocol(TimelyProtocol):
    """HTTP by h11 for uvicorn; answers requests of clients that have shut down their side of the
    connection."""

    is_half_closed = False
    _next: asyncio.TimerHandle | None = None

    def eof_received(self) -> bool:
        """Return whether the connection stays open for the answer. It does not for an HTTP/1.0
        client, which knows no interim response."""
        waits = (
            self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        )
        self.is_half_closed = waits and self.scope["http_version"] != "1.0"
        if self.is_half_closed:
            self._probe(_FIRST_S)
        return self.is_half_closed

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next:
            self._next.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_half_closed and self.cycle.response_complete:
            self.transport.close()

    def _probe(self, wait_s: float) -> None:
        """Send what a waiting client ignores; the transport notices a reset when it sends again."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if not self.cycle.response_started:
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(interim))
        elif takes_comments(self.scope):
            self.transport.write(self.conn.send(h11.Data(data=b":\n\n")))
        self._next = self.loop.call_later(wait_s, self._probe, _PROBE_S)
