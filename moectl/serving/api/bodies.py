"""Bodies of requests as they are read: by their fields, with a line for what is wrong."""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from artifacts.common.suggestions import nearest
from moectl.serving.openai_api import ChatBody, names_of, unknown_names
from moectl.serving.wire import Refusal, ignore, object_of, shown

Body = TypeVar("Body", bound=BaseModel)


class AsksAsChat(Protocol):
    """A body of another API, for which a chat can be asked."""

    model: str

    def as_chat(self) -> dict[str, object]:
        """Return the body of that chat. Raises ValueError where there is none."""


def documented(kind: type[BaseModel]) -> dict[str, object]:
    """Return the part of /openapi.json that describes a body that `given` reads."""
    schema = {
        "$id": f"urn:moectl:{kind.__name__}",
        **kind.model_json_schema(),
    }  # its references are within itself
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def given(kind: type[Body], *, is_strict: bool) -> Callable[[Request], Awaitable[Body]]:
    """Return the dependency that reads the body of a request."""

    async def read(request: Request) -> Body:
        found = await object_of(request)
        asked = _valid(kind, found)
        _take_unknown(request, asked, is_strict=is_strict)
        return asked

    return read


def _valid(kind: type[Body], found: object) -> Body:
    try:
        return kind.model_validate(found)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        raise Refusal(400, f"{where}: {said}" if where else said, param=where or None) from None


def chat_of(asked: AsksAsChat) -> ChatBody:
    """Return the chat that asks for the same as the body of another API. Raises Refusal where no
    chat does."""
    try:
        fields = asked.as_chat()
    except ValueError as problem:
        raise Refusal(400, str(problem)) from None
    return _valid(ChatBody, {name: value for name, value in fields.items() if value is not None})


def _take_unknown(request: Request, asked: BaseModel, *, is_strict: bool) -> None:
    """Note the names that the reference does not have for the header of the answer. Raises Refusal
    if the server is strict."""
    names = list(dict.fromkeys(unknown_names(asked)))
    if names and is_strict:
        near = nearest(names[0], names_of(type(asked)))
        hint = f"did you mean {near}?" if near else "leave it out"
        raise Refusal(400, f"{shown(names[0])}: there is no such option: {hint}", names[0])
    ignore(request.scope, names)
