"""Connections whose client has closed its side: it may still wait for the answer, or be gone.

Both cases look the same until the server sends something, because TCP signals the end of a client's
data in either case. A client that has gone answers with a reset. So the server sends something that
a waiting client ignores: an interim response before the answer (RFC 9110, 15.2), a comment within a
stream of events.
"""

import asyncio

import h11
from starlette.types import Scope

from moectl.serving.arrival import TimelyProtocol

# a reset arrives after one round trip
_FIRST_S = 0.02
_PROBE_S = 1.0
_COMMENTS = "takes_comments"  # in the state of a request


def is_stream(scope: Scope) -> None:
    """Declare that the response to a request is a stream of events, sent as whole events."""
    scope["state"][_COMMENTS] = True


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
        elif _COMMENTS in self.scope["state"]:
            self.transport.write(self.conn.send(h11.Data(data=b":\n\n")))
        self._next = self.loop.call_later(wait_s, self._probe, _PROBE_S)
