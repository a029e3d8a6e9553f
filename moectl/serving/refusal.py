"""Refused requests, as errors in the format of OpenAI's API. Imports no torch."""

from dataclasses import dataclass, field


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
