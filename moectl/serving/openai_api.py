"""Bodies of requests, with the names of OpenAI's reference; an option that is not offered is
refused by name, one that the reference does not have is ignored by name."""

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)

from artifacts.errors import BadUsage
from moectl.serving.api.formats import ResponseFormat, biases_of
from moectl.shared.terminal.messages import text_of
from runtime.drafters.base import MOST
from runtime.session.generation.grammar.grammars import Grammar
from runtime.session.generation.sampling import Sampling
from runtime.session.prompts.chat_prompt import NO_THOUGHTS, ChatPrompt

_SHORT = 16  # default max_tokens of a completion, as in OpenAI's API


def _only(*values: object) -> PlainValidator:
    """Accept null and `values`, which all ask for the default behaviour. Types count: False is not
    0."""

    def check(given: Any) -> None:
        if given is not None and not any(
            type(given) is type(value) and given == value for value in values
        ):
            raise ValueError(
                f"can only be {json.dumps(values[0] if values else None)} here: leave it out"
            )

    return PlainValidator(check)


Absent = Annotated[None, _only()]
Penalty = Annotated[float, Field(ge=-2, le=2)]
_MOST_STOPS = 16


def _stops(given: Any) -> tuple[str, ...]:
    stops = [] if given is None else [given] if isinstance(given, str) else given
    if not (
        isinstance(stops, list)
        and len(stops) <= _MOST_STOPS
        and all(isinstance(stop, str) and stop for stop in stops)
    ):
        raise ValueError(f"one text or up to {_MOST_STOPS}, none of them empty")
    return tuple(stops)


def _prompts(given: Any) -> list[str | list[int]]:
    is_several = isinstance(given, list) and given and isinstance(given[0], str | list)
    return [_prompt(one) for one in (given if is_several else [given])]


def _prompt(prompt: Any) -> str | list[int]:
    is_ids = isinstance(prompt, list) and all(
        type(token) is int and 0 <= token < 2**31 for token in prompt
    )
    if not (isinstance(prompt, str) or is_ids):
        raise ValueError("a text or a list of token ids, or a list of such prompts")
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token of text")
    return prompt


Count = Annotated[int, Field(ge=1)]


class StrictBody(BaseModel):
    """A body whose types count, and whose unknown names are kept apart."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


def names_of(kind: type[BaseModel]) -> list[str]:
    """Return the names that the fields of a body have in JSON."""
    return [field.alias or name for name, field in kind.model_fields.items()]


def unknown_names(body: BaseModel, within: str = "") -> Iterator[str]:
    """Yield the names that a body has and its reference does not, as `messages.mood`."""
    yield from (within + name for name in body.model_extra or ())
    for name in type(body).model_fields:
        value = getattr(body, name)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, BaseModel):
                yield from unknown_names(part, f"{within}{name}.")


class StreamOptions(StrictBody):
    include_usage: bool = False
    include_obfuscation: Annotated[None, _only(False)] = None


class RequestBody(StrictBody):
    """Fields of both kinds of request; those after `user` are moectl's own, some of them as other
    servers have them."""

    model: str = ""  # the served one
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stops)] = ()
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(biases_of)] = ()
    response_format: ResponseFormat | None = None
    user: str | None = None  # whom the counters name
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    grammar: str | None = None
    regex: str | None = None
    ignore_eos: bool = False
    counters: bool | Literal["by_token"] = False
    # the most drafts of a pass, as llama.cpp names it; 0: none
    num_drafts: Annotated[int, Field(ge=0, alias="speculative.n_max")] = MOST

    @field_validator("stream_options")
    @classmethod
    def _goes_with_stream(
        cls, options: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        if options is not None and not info.data.get("stream"):
            raise ValueError("only with stream: true")
        return options

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        asked = [self.response_format and self.response_format.grammar, self.grammar, self.regex]
        if sum(one is not None for one in asked) > 1:
            raise ValueError("response_format, grammar and regex exclude each other: give one")
        return self

    @property
    def form(self) -> Grammar | None:
        """The grammar that an answer must have."""
        if self.grammar is not None:
            return Grammar("grammar", self.grammar)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        return self.response_format.grammar if self.response_format else None

    @property
    def num_choices(self) -> int:
        """The number of answers to each prompt."""
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """The number of log probabilities beside each token's own, None for none at all."""
        raise NotImplementedError

    @property
    def has_usage(self) -> bool:
        """True if a stream ends with its token counts."""
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
            min_p=self.min_p,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias,
            num_logprobs=self.num_logprobs,
            grammar=self.form,
        )


class CompletionBody(RequestBody):
    """One prompt or several: texts, or token ids."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    best_of: Annotated[None, _only(1)] = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: Annotated[None, _only("")] = None

    @field_validator("echo")
    @classmethod
    def _has_no_logprobs(cls, echo: bool | None, info: ValidationInfo) -> bool | None:
        if echo and info.data.get("logprobs") is not None:
            raise ValueError("log probabilities of a prompt are not computed: leave one out")
        return echo

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_new(self) -> int:
        """The requested limit on new tokens."""
        return _SHORT if self.max_tokens is None else self.max_tokens


def _role(given: str) -> str:
    # Templates that do not know the newer name would leave the message out without a word.
    return "system" if given == "developer" else given


class FunctionBody(StrictBody):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(StrictBody):
    type: Literal["function"]
    function: FunctionBody


class NamedFunction(StrictBody):
    name: str


class NamedTool(StrictBody):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(StrictBody):
    """A call as the model made it; `arguments` are JSON, unless it failed."""

    name: str
    arguments: str


class CalledTool(StrictBody):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


def _content(given: Any, info: ValidationInfo) -> str | None:
    has_calls = info.data.get("role") == "assistant" and info.data.get("tool_calls")
    return None if given is None and has_calls else text_of(given)


class Message(StrictBody):
    """One turn. Empty fields that OpenAI's answers carry beside the text are accepted, so that one
    can be sent back."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"], AfterValidator(_role)
    ]
    tool_calls: list[CalledTool] | None = None
    content: Annotated[str | None, PlainValidator(_content), Field(validate_default=True)] = None
    name: str | None = None  # of a participant, which is the template's to show
    refusal: Absent = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: Absent = None
    audio: Absent = None
    annotations: Annotated[None, _only([])] = None

    @property
    def turn(self) -> dict[str, object]:
        """The message in the form that the model's template takes."""
        beside = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
            "tool_calls": [call.model_dump() for call in self.tool_calls or ()] or None,
        }
        said = {name: value for name, value in beside.items() if value is not None}
        return {"role": self.role, "content": self.content} | said


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(RequestBody):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[None, _only([])] = None
    function_call: Annotated[None, _only("none")] = None
    modalities: Annotated[None, _only(["text"])] = None
    audio: Absent = None
    prediction: Absent = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # as other servers have it
    verbosity: Annotated[None, _only("medium")] = None
    web_search_options: Absent = None
    moderation: Absent = None
    store: Annotated[None, _only(False)] = None
    service_tier: Annotated[None, _only("auto", "default")] = None
    # Ignored: they do not change an answer.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, str] | None = None
    prompt_cache_retention: str | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _goes_with_logprobs(cls, num_top: int | None, info: ValidationInfo) -> int | None:
        if num_top and not info.data.get("logprobs"):
            raise ValueError("only with logprobs: true")
        return num_top

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @field_validator("max_completion_tokens")
    @classmethod
    def _is_the_only_limit(cls, limit: int | None, info: ValidationInfo) -> int | None:
        if limit is not None and info.data.get("max_tokens") is not None:
            raise ValueError("give it or max_tokens, not both")
        return limit

    @field_validator("tools")
    @classmethod
    def _have_names_of_their_own(cls, tools: list[ToolBody] | None) -> list[ToolBody] | None:
        if len({tool.function.name for tool in tools or ()}) < len(tools or ()):
            raise ValueError("two tools have one name")
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _is_among_the_tools(
        cls, choice: str | NamedTool | None, info: ValidationInfo
    ) -> str | NamedTool | None:
        names = [tool.function.name for tool in info.data.get("tools") or ()]
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(f"there is no tool {choice.function.name!r}")
        if choice == "required" and not names:
            raise ValueError("give tools with it")
        return choice

    def prompt(self) -> ChatPrompt:
        """Return the chat with its tools and the options of the template. Raises BadUsage for an
        option that no template has."""
        tools = self._offered
        is_formed = self.form is not None
        effort = {} if self.reasoning_effort is None else _efforts(self.reasoning_effort)
        return ChatPrompt(
            [message.turn for message in self.messages],
            [tool.model_dump(exclude_none=True) for tool in tools],
            effort | (self.chat_template_kwargs or {}),
            max_calls=1 if self.parallel_tool_calls is False else None,
            must_call=self._must_call or (is_formed and bool(tools)),
            is_formed=is_formed and not tools,
        )

    def sampling(self, max_new_tokens: int) -> Sampling:
        """Return the sampling, by which the answer is a call where a tool must be called, and a
        call or the form where one is given beside tools. Raises BadUsage for a form that is no
        JSON."""
        sampling = super().sampling(max_new_tokens)
        if not self._must_call and (self.form is None or not self._offered):
            return sampling
        functions = [tool.function for tool in self._offered]
        functions = [one for one in functions if self._chosen in (None, one.name)]
        schemas = [_call_schema(one, f"#/anyOf/{at}") for at, one in enumerate(functions)]
        if not self._must_call:
            if self.form.kind != "json_schema":
                raise BadUsage(f'a {self.form.kind} calls no tool: give tool_choice "none" with it')
            schemas.append(json.loads(_placed(self.form.text, f"#/anyOf/{len(schemas)}")))
        return replace(sampling, grammar=Grammar.of_schema({"anyOf": schemas}))

    @property
    def _offered(self) -> Sequence[ToolBody]:
        return () if self.tool_choice == "none" else self.tools or ()

    @property
    def _chosen(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def _must_call(self) -> bool:
        return self.tool_choice == "required" or self._chosen is not None

    @property
    def num_new(self) -> int | None:
        """The requested limit on new tokens, None for as many as there is room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _efforts(effort: Effort) -> dict[str, object]:
    """Return the variables by which templates are told how much to think."""
    if effort == "none":
        return NO_THOUGHTS
    return {"reasoning_effort": effort}


def _call_schema(function: FunctionBody, place: str) -> dict[str, object]:
    """Return the JSON schema of a call, its name first, for a place within another schema: the
    references of its parameters lead there."""
    text = json.dumps(function.parameters or {"type": "object"})
    placed = _placed(text, f"{place}/properties/arguments")
    members = {"name": {"const": function.name}, "arguments": json.loads(placed)}
    return {
        "type": "object",
        "properties": members,
        "required": list(members),
        "additionalProperties": False,
    }


def _placed(schema: str, place: str) -> str:
    """Return the text of a schema whose references lead to a place within another one."""
    return schema.replace('"$ref": "#', f'"$ref": "{place}')


class PresetBody(StrictBody):
    preset: str
