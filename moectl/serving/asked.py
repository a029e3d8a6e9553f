"""What clients may ask for, as OpenAI's reference names it; what is not offered is refused by name."""

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from runtime.generate import Sampling

# Accepted where they say what happens anyway, refused where they ask for more. None always says so.
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

Count = Annotated[int, Field(ge=1)]
Stop = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # not for us, who send every token by itself anyway


class Asked(_Strict):
    """What both kinds of request share. `top_k`, `repetition_penalty`, `ignore_eos` and `counters` are moectl's own."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    top_k: Annotated[int, Field(ge=0)] = 0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
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
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with what was used."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, max_new_tokens: int) -> Sampling:
        """OpenAI's defaults are 1 for temperature and top_p, and a seed nobody knows."""
        return Sampling(
            max_new_tokens=max_new_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            repetition_penalty=self.repetition_penalty,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            ignore_eos=self.ignore_eos,
        )


class AskedCompletion(Asked):
    """One prompt: text, or token ids."""

    prompt: str | list[Annotated[int, Field(ge=0)]] | Annotated[list[str], Field(min_length=1, max_length=1)]


class _Part(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]
    name: str | None = None
    refusal: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class AskedChat(Asked):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None


class AskedPreset(_Strict):
    preset: str
