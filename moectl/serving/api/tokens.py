"""What llama.cpp's server and vLLM tell of a model beside its answers: tokens of a text, texts of
tokens, and the model's properties. Clients of both are understood."""

import asyncio
from importlib.metadata import version
from typing import Annotated

from fastapi import Depends, FastAPI
from pydantic import Field, model_validator

from moectl.serving.api.bodies import documented, given
from moectl.serving.openai_api import Message, StrictBody
from moectl.serving.scheduler import Scheduler
from runtime.session.prompts.encoder import Prompt
from runtime.session.session import Session


class TextBody(StrictBody):
    """A text as `content` (llama.cpp: special tokens only with `add_special`) or as `prompt` (vLLM:
    without them only if `add_special_tokens` is false), or a chat."""

    model: str = ""
    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _is_one(self) -> "TextBody":
        if sum(one is not None for one in (self.content, self.prompt, self.messages)) != 1:
            raise ValueError("give one of content, prompt and messages")
        return self

    def ids(self, session: Session) -> list[int]:
        """Return the tokens of the text or the chat. Raises as Session.encode does."""
        if self.messages:
            turns: Prompt = [message.turn for message in self.messages]
            return session.encode(turns)[0].tolist()
        has_special = self.add_special_tokens if self.content is None else self.add_special
        text = self.content or self.prompt or ""
        session.prompts.check(text)
        return session.opened.tokenizer(text, add_special_tokens=has_special).input_ids


class TokensBody(StrictBody):
    model: str = ""
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


def add_tokens(app: FastAPI, scheduler: Scheduler, *, is_strict: bool) -> None:
    """Add the routes to an application."""

    @app.post("/tokenize", openapi_extra=documented(TextBody))
    async def tokenize(
        asked: Annotated[TextBody, Depends(given(TextBody, is_strict=is_strict))],
    ) -> dict[str, object]:
        """Return the tokens of a text or of a chat, and their number."""
        ids = await asyncio.to_thread(scheduler.with_session, asked.ids)
        return {"tokens": ids, "count": len(ids), "max_model_len": scheduler.num_positions}

    @app.post("/detokenize", openapi_extra=documented(TokensBody))
    async def detokenize(
        asked: Annotated[TokensBody, Depends(given(TokensBody, is_strict=is_strict))],
    ) -> dict[str, str]:
        """Return the text of tokens, special ones too."""
        text = scheduler.session.opened.tokenizer.decode(asked.tokens)
        return {"content": text, "prompt": text}

    @app.get("/version")
    async def told_version() -> dict[str, str]:
        return {"version": version("moectl")}


def add_props(app: FastAPI, scheduler: Scheduler, model: str) -> None:
    """Add the route of the properties of the model that clients call `model`."""

    @app.get("/props")
    async def props() -> dict[str, object]:
        """Return the model's properties by their names in llama.cpp's server."""
        tokenizer = scheduler.session.opened.tokenizer
        return {
            "default_generation_settings": {"n_ctx": scheduler.num_positions},
            "total_slots": scheduler.num_rows,
            "model_alias": model,
            "chat_template": tokenizer.chat_template or "",
            "bos_token": tokenizer.bos_token or "",
            "eos_token": tokenizer.eos_token or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"moectl {version('moectl')}",
        }
