"""Connections whose requests arrive in time: one that is sent by halves would hold memory and a
place for ever."""

import json
from asyncio import TimerHandle

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from moectl.serving.guard import ServerLimits
from moectl.serving.refusal import error

_LIMITS = ServerLimits()


class TimelyProtocol(H11Protocol):
    """HTTP by h11 for uvicorn; a request whose head or body has not arrived in the time of `limits`
    gets status 408, and its connection is closed."""

    def __init__(self, *args: object, limits: ServerLimits = _LIMITS, **own: object) -> None:
        super().__init__(*args, **own)
        self._limits = limits
        # the state of what the client sends, and its request
        self._awaited: tuple[object, object] | None = None
        self._late: TimerHandle | None = None

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
