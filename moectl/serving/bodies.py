"""Bodies of requests, with the names of OpenAI's reference; an option that is not offered is refused by name."""

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from runtime.session.generate import Sampling

# Accepted with the value of the default behaviour (or None), refused with any other.
_ONLY: dict[str, object] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "logprobs": False,
    "top_logprobs": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "audio": None,
    "prediction": None,
    "reasoning_effort": None,
    "web_search_options": None,
}
_IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier", "parallel_tool_calls")


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given or []
    if not (isinstance(stops, list) and len(stops) <= 4 and all(isinstance(stop, str) and stop for stop in stops)):
        raise ValueError("one text or up to four, none of them empty")
    return tuple(stops)


def _prompt(given: Any) -> str | list[int]:
    prompt = given[0] if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list) else given
    is_ids = isinstance(prompt, list) and all(type(token) is int and 0 <= token < 2**31 for token in prompt)
    if not (isinstance(prompt, str) or is_ids):
        raise ValueError("one text or one list of token ids; send several prompts side by side")
    return prompt


def _content(given: Any) -> str:
    """The text of a message; its parts are joined."""
    if isinstance(given, str):
        return given
    parts = given if isinstance(given, list) else [given]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise ValueError("a text, or parts of the type text")
    return "".join(texts)


Count = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted and ignored: tokens are sent one by one


class RequestBody(_Strict):
    """Fields of both kinds of request; `top_k`, `repetition_penalty`, `ignore_eos` and `counters` are moectl's own."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stops)] = ()
    top_k: Annotated[int, Field(ge=0)] = 0
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    ignore_eos: bool = False
    counters: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, only in _ONLY.items():
            if given.get(name) not in (None, only):
                raise ValueError(f"{name} can only be {only!r} here: leave it out")
        return {name: value for name, value in given.items() if name not in _ONLY and name not in _IGNORED}

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with its token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, max_new_tokens: int) -> Sampling:
        """Sampling with OpenAI's defaults: temperature 1, top_p 1 and a random seed."""
        return Sampling(
            max_new_tokens=max_new_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            repetition_penalty=self.repetition_penalty,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            ignore_eos=self.ignore_eos,
        )


class CompletionBody(RequestBody):
    """One prompt: text, or token ids."""

    prompt: Annotated[str | list[int], PlainValidator(_prompt)]


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_content)]
    name: str | None = None
    refusal: str | None = None


class ChatBody(RequestBody):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None


class PresetBody(_Strict):
    preset: str
