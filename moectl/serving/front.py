"""The part of a server that answers from its first moment: the page and /health. Imports no
torch."""

from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from moectl.serving.guard import FILES
from moectl.serving.wire import AsciiJson, error

# The page may run its own files and call this server only; text becomes markup by DOMPurify alone;
# no other page may show it in a frame.
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser asks whether its copy is still the newest
}


class Front:
    """An ASGI application that answers everything else with status 503 and the code `loading` until
    `begin`.

    `model` is the name that clients use.
    """

    def __init__(self, model: str) -> None:
        self._page = GZipMiddleware(_Files(packages=[("moectl.serving", "page")], html=True))
        said = error(503, f"{model} is loading: try again in a moment", code="loading")
        self._app: ASGIApp = AsciiJson(said, 503, headers={"Retry-After": "1"})
        self._is_alive: Callable[[], bool] | None = None

    def begin(self, app: ASGIApp, is_alive: Callable[[], bool]) -> None:
        """Pass requests on to `app` from here on; `is_alive` says whether it takes any."""
        self._app = app
        self._is_alive = is_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        if is_read and scope["path"] == "/":
            await self._page(scope, receive, send)
        elif is_read and scope["path"].startswith(FILES):
            await self._page(scope | {"root_path": FILES.rstrip("/")}, receive, send)
        elif is_read and scope["path"] == "/health":
            await self._health()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _health(self) -> AsciiJson:
        if self._is_alive is None:
            return AsciiJson({"status": "loading"}, 503)
        return (
            AsciiJson({"status": "ok"})
            if self._is_alive()
            else AsciiJson({"status": "stopping"}, 503)
        )


class _Files(StaticFiles):
    """The files of the page."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        try:
            answer = await super().get_response(path, scope)
        except HTTPException as problem:
            status = problem.status_code
            return AsciiJson(error(status, f"{scope['path']}: {problem.detail}"), status)
        answer.headers.update(_HEADERS)
        return answer
