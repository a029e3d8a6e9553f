"""The part of a server that answers from its first moment: the page and /health. Imports no
torch."""

from collections.abc import Callable
from importlib.resources import files

from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from moectl.serving.wire import AsciiJson, error

# The page may run its own script and call this server only; no other page may show it in a frame.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src "
    "'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "X-Frame-Options": "DENY"}


class Front:
    """An ASGI application that answers everything else with status 503 and the code `loading` until
    `begin`.

    `model` is the name that clients use.
    """

    def __init__(self, model: str) -> None:
        page = files("moectl.serving").joinpath("page.html").read_text(encoding="utf-8")
        self._page = HTMLResponse(page, headers=_HEADERS)
        said = error(503, f"{model} is loading: try again in a moment", code="loading")
        self._app: ASGIApp = AsciiJson(said, 503, headers={"Retry-After": "1"})
        self._is_alive: Callable[[], bool] | None = None

    def begin(self, app: ASGIApp, is_alive: Callable[[], bool]) -> None:
        """Pass requests on to `app` from here on; `is_alive` says whether it takes any."""
        self._app = app
        self._is_alive = is_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope)(scope, receive, send)

    def _answer(self, scope: Scope) -> ASGIApp:
        is_read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        if is_read and scope["path"] == "/":
            return self._page
        return self._health() if is_read and scope["path"] == "/health" else self._app

    def _health(self) -> AsciiJson:
        if self._is_alive is None:
            return AsciiJson({"status": "loading"}, 503)
        return (
            AsciiJson({"status": "ok"})
            if self._is_alive()
            else AsciiJson({"status": "stopping"}, 503)
        )
