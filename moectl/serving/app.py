"""The HTTP application over a model: OpenAI's routes, and the routes that feed the page."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, TypeVar

import torch
from fastapi import Depends, FastAPI, Request
from fastapi.encoders import jsonable_encoder
from fastapi.responses import Response, StreamingResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from artifacts.errors import Problem
from moectl.serving import metrics
from moectl.serving.answers import AnswerFormat, Form, OneAnswer
from moectl.serving.api.bodies import AsksAsChat, chat_of, documented, given
from moectl.serving.api.choices import AnswerChoices
from moectl.serving.api.messages import PATH as MESSAGES
from moectl.serving.api.messages import CountBody, MessageFormat, MessagesBody
from moectl.serving.api.reference import add_reference
from moectl.serving.api.responses import ResponseFormat, ResponsesBody
from moectl.serving.api.tokens import add_props, add_tokens
from moectl.serving.jobs import (
    Done,
    Event,
    Failed,
    GenerationJob,
    LoggedToken,
    LoggedTokens,
    TokenCost,
)
from moectl.serving.openai_api import (
    ChatBody,
    CompletionBody,
    PresetBody,
    RequestBody,
)
from moectl.serving.scheduler import Closing, Full, Scheduler, code_of
from moectl.serving.wire import (
    AsciiJson,
    Refusal,
    TellsIgnored,
    error,
    in_dialect,
    is_stream,
)
from runtime.policies.presets import presets
from runtime.session.generation.sampling import TooLong
from runtime.session.prompts.encoder import Prompt
from runtime.session.session import Session

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Serving:
    """Configuration of the application. `model` is the name that clients use, or one of `aliases`;
    `presets` maps names to descriptions. `why` is the reason for the first preset, empty if the
    user named it. With `is_strict` a request with an unknown option is refused."""

    scheduler: Scheduler
    model: str
    presets: Mapping[str, str]
    why: str = ""
    aliases: tuple[str, ...] = ()
    is_strict: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


def application(serving: Serving) -> FastAPI:
    """The application behind the server's front. The scheduler must have been started; the server
    closes it."""
    scheduler = serving.scheduler
    strict = serving.is_strict
    app = FastAPI(title="moectl", docs_url=None, redoc_url=None, default_response_class=AsciiJson)
    app.add_middleware(TellsIgnored)
    _add_errors(app)
    _add_watching(app, serving)
    add_tokens(app, scheduler, is_strict=strict)
    add_props(app, scheduler, serving.model)
    add_reference(app)

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [_model(serving, name) for name in _names(serving)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, object]:
        _check_model(serving, name)
        return _model(serving, name)

    @app.post("/v1/chat/completions", openapi_extra=documented(ChatBody))
    async def chat(
        asked: Annotated[ChatBody, Depends(given(ChatBody, is_strict=strict))], request: Request
    ) -> object:
        _check_model(serving, asked.model)
        return await _answer(serving, asked, request, [asked.prompt()], asked.num_new)

    @app.post("/v1/completions", openapi_extra=documented(CompletionBody))
    async def complete(
        asked: Annotated[CompletionBody, Depends(given(CompletionBody, is_strict=strict))],
        request: Request,
    ) -> object:
        _check_model(serving, asked.model)
        prompts = [await asyncio.to_thread(_bounded, one, scheduler) for one in asked.prompt]
        return await _answer(serving, asked, request, prompts, asked.num_new)

    _add_other_apis(app, serving)
    return app


def _add_other_apis(app: FastAPI, serving: Serving) -> None:
    """Add the routes whose requests become chats."""
    strict = serving.is_strict

    @app.post("/v1/responses", openapi_extra=documented(ResponsesBody))
    async def respond(
        asked: Annotated[ResponsesBody, Depends(given(ResponsesBody, is_strict=strict))],
        request: Request,
    ) -> object:
        """Answer as OpenAI's Responses; nothing is stored."""

        def form(num_tokens: int) -> Form:
            return ResponseFormat(asked, serving.model, num_tokens)

        return await _answer_as_chat(serving, asked, request, form)

    @app.post(MESSAGES, openapi_extra=documented(MessagesBody))
    async def message(
        asked: Annotated[MessagesBody, Depends(given(MessagesBody, is_strict=strict))],
        request: Request,
    ) -> object:
        """Answer as Anthropic's Messages."""
        form = partial(MessageFormat, serving.model)
        return await _answer_as_chat(serving, asked, request, form, may_be_less=True)

    @app.post(f"{MESSAGES}/count_tokens", openapi_extra=documented(CountBody))
    async def count(
        asked: Annotated[CountBody, Depends(given(CountBody, is_strict=strict))],
    ) -> dict[str, int]:
        """Count the tokens of a prompt, as Anthropic's count_tokens."""
        _check_model(serving, asked.model)
        prompt = chat_of(asked).prompt()
        ids = await asyncio.to_thread(
            serving.scheduler.with_session, lambda session: session.encode(prompt)
        )
        return {"input_tokens": ids.shape[1]}


async def _answer_as_chat(
    serving: Serving,
    asked: AsksAsChat,
    request: Request,
    form: Callable[[int], Form],
    *,
    may_be_less: bool = False,
) -> object:
    """Answer a body of another API. With `may_be_less` its answer has the tokens there is room for:
    Anthropic's clients must send a number, and send large ones."""
    _check_model(serving, asked.model)
    chat = chat_of(asked)
    return await _answer(
        serving, chat, request, [chat.prompt()], chat.num_new, form, may_be_less=may_be_less
    )


def _add_watching(app: FastAPI, serving: Serving) -> None:
    scheduler = serving.scheduler
    # which the page offers on demand only
    studies = [name for name, preset in presets().items() if preset.is_study]

    @app.get("/live")
    async def live() -> AsciiJson:
        told = {"model": serving.model, "presets": serving.presets, "studies": studies}
        told |= metrics.live(scheduler)
        return AsciiJson(jsonable_encoder(told))  # FastAPI's own way would refuse half a character

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(
            metrics.prometheus(scheduler, serving.model), media_type=CONTENT_TYPE_PLAIN_0_0_4
        )

    @app.post("/preset", openapi_extra=documented(PresetBody))
    async def switch(
        asked: Annotated[PresetBody, Depends(given(PresetBody, is_strict=serving.is_strict))],
    ) -> dict[str, object]:
        """Switch the preset after the requests that arrived earlier."""
        if asked.preset not in serving.presets:
            raise Refusal(
                404,
                f"there is no preset {asked.preset!r}: {', '.join(serving.presets)}",
                param="preset",
            )
        switch = _or_refuse(lambda: scheduler.switch(asked.preset))
        try:
            await asyncio.wrap_future(switch.settled)
        except Closing:
            raise _stopping() from None
        return {"preset": scheduler.preset}


def _add_errors(app: FastAPI) -> None:
    def told(
        request: Request,
        status: int,
        body: dict[str, object],
        headers: Mapping[str, str] | None = None,
    ) -> AsciiJson:
        return AsciiJson(in_dialect(request.url.path, status, body), status, headers=headers)

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> AsciiJson:
        return told(request, refusal.status, refusal.body(), refusal.headers)

    @app.exception_handler(Problem)
    async def problem_of_user(request: Request, problem: Problem) -> AsciiJson:
        return told(request, 400, error(400, str(problem), code=code_of(problem)))

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, problem: HTTPException) -> AsciiJson:
        message = f"{request.method} {request.url.path}: {problem.detail}"
        status = problem.status_code
        return told(request, status, error(status, message), problem.headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, problem: Exception) -> AsciiJson:
        return told(request, 500, error(500, f"internal error: {type(problem).__name__}"))


# One request


def _bounded(asked: str | list[int], scheduler: Scheduler) -> str | torch.Tensor:
    """The prompt of a completion; token ids are taken as given. Raises TooLong for one that cannot
    fit, before it is encoded."""
    if isinstance(asked, str):
        scheduler.session.prompts.check(asked)
        return asked
    longest = scheduler.num_positions
    if longest and len(asked) > longest:
        raise TooLong(f"{len(asked)} prompt tokens exceed the {longest} positions: give fewer")
    return torch.tensor([asked], dtype=torch.int64)


async def _answer(
    serving: Serving,
    asked: RequestBody,
    request: Request,
    prompts: Sequence[Prompt | torch.Tensor],
    max_tokens: int | None,
    form_of: Callable[[int], Form] | None = None,
    *,
    may_be_less: bool = False,
) -> object:
    scheduler = serving.scheduler
    most = scheduler.limits.max_tokens
    if may_be_less and most:
        max_tokens = min(most, max_tokens or most)
    elif most and max_tokens is not None and max_tokens > most:
        raise Refusal(
            400, f"answers here have at most {most} tokens, not {max_tokens}", param="max_tokens"
        )
    job = GenerationJob(
        prompts[0],
        max_tokens,
        asked.sampling(max_tokens or 1),
        asked.stop,
        tell=_untold,
        owner=(asked.user or "")[:_LONGEST_NAME],
        may_be_less=may_be_less,
        by_token=asked.counters == "by_token",
        most_drafts=asked.num_drafts,
    )
    choices = AnswerChoices(job, prompts, num_each=asked.num_choices)
    _or_refuse(lambda: choices.submit(scheduler))
    with ExitStack() as at_end:
        at_end.callback(choices.leave, scheduler)
        num_tokens = await _unless_gone(request, choices.num_prompt_tokens())
        if num_tokens is None:
            return None
        form = (
            OneAnswer(form_of(num_tokens))
            if form_of
            else AnswerFormat(
                "messages" in type(asked).model_fields,
                serving.model,
                num_tokens,
                asked.has_usage,
                bool(asked.counters),
                _echoes(asked, prompts, scheduler.session),
            )
        )
        if asked.stream:
            return _Stream(_streamed(form, choices), at_end.pop_all().close)
        whole = await _unless_gone(request, choices.whole())
        return None if whole is None else form.whole(whole)


def _untold(event: Event) -> None:
    """Stand for what each choice puts in its place."""


def _echoes(
    asked: RequestBody, prompts: Sequence[Prompt | torch.Tensor], session: Session
) -> tuple[str, ...]:
    """Return the text before each choice: its prompt, if the request asks for an echo."""
    texts = [""] * len(prompts)
    if isinstance(asked, CompletionBody) and asked.echo:
        tokenizer = session.opened.tokenizer
        texts = [one if isinstance(one, str) else tokenizer.decode(one[0]) for one in prompts]
    return tuple(text for text in texts for _ in range(asked.num_choices))


class _Stream(StreamingResponse):
    """Server-sent events; `leave` is called after the last event or when the client has
    disconnected."""

    def __init__(self, events: AsyncIterator[str], leave: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_stream(scope)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


async def _streamed(form: AnswerFormat | OneAnswer, choices: AnswerChoices) -> AsyncIterator[str]:
    for begin in form.begins():
        yield begin
    tokens: dict[int, tuple[LoggedToken, ...]] = {}  # whose text follows, by choice
    dones: list[Done] = []
    async for index, item in choices.events():
        match item:
            case LoggedTokens(more):
                tokens[index] = tokens.get(index, ()) + more
            case Done():
                dones.append(item)
                yield form.ends(index, item, tokens.pop(index, ()))
            case Failed(message, status):
                yield form.fails(message, status)
                return
            case TokenCost():
                yield form.costs(index, item)
            case piece:
                yield form.goes_on(index, piece, tokens.pop(index, ()))
    for last in form.closes(dones):
        yield last


async def _unless_gone(request: Request, answer: Coroutine[None, None, T]) -> T | None:
    """Return the result of `answer`, or None once the client has disconnected."""

    async def hangs_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering = asyncio.create_task(answer)
    gone = asyncio.create_task(hangs_up())
    try:
        await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
        return await answering if answering.done() else None
    finally:
        for task in (answering, gone):
            task.cancel()
        await asyncio.gather(answering, gone, return_exceptions=True)


def _or_refuse(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except Full:
        raise Refusal(
            429, "too many requests are waiting: try again", code="queue_full", headers=_SOON
        ) from None
    except Closing:
        raise _stopping() from None


def _stopping() -> Refusal:
    return Refusal(503, "the server is stopping", headers=_SOON)


_SOON = {"Retry-After": "1"}
_LONGEST_NAME = 64  # characters of `user`


def _names(serving: Serving) -> tuple[str, ...]:
    return serving.model, *serving.aliases


def _check_model(serving: Serving, name: str) -> None:
    """Raise Refusal for the name of another model; none at all is this one's."""
    names = _names(serving)
    if name and name not in names:
        ours = ", ".join(map(repr, names))
        raise Refusal(
            404, f"there is no model {name!r} here, only {ours}", "model", "model_not_found"
        )


def _model(serving: Serving, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "moectl",
        "max_model_len": serving.scheduler.num_positions,
    }
