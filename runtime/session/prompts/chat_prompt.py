"""A chat as a prompt: its messages, the tools that the model may call, and options of the
template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from artifacts.errors import BadUsage

Turn = Mapping[str, object]
"""A message: `role`, `content` (a text, or None beside calls), and what else the template knows, as
`name`, `tool_calls`, `tool_call_id`, `reasoning_content`."""

_OURS = (
    "conversation conversations messages tools chat_template tokenize add_generation_prompt "
    "continue_final_message return_tensors return_dict return_assistant_tokens_mask padding "
    "truncation max_length tokenizer_kwargs"
)

NO_THOUGHTS = {"enable_thinking": False, "thinking": False}
"""The variables by which templates are told that a model should not think."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat to answer. `tools` are as OpenAI's reference has them; `options` are variables of the
    model's template, JSON values by name; at most `max_calls` tools are called. With `must_call`
    the sampling makes the reply one call, as a JSON object of `name` and `arguments`; with
    `is_formed` its grammar holds the reply, in which no calls are looked for. Reasoning may come
    before either where its marks are a token each; other models are told not to think. Raises
    BadUsage for an option that would replace what is not the caller's to give."""

    turns: Sequence[Turn]
    tools: Sequence[Mapping[str, object]] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    max_calls: int | None = None
    must_call: bool = False
    is_formed: bool = False

    def __post_init__(self) -> None:
        for name in self.options:
            if name in _OURS.split() or not name.isidentifier():
                raise BadUsage(f"{name[:40]!r} is no option of a chat template: leave it out")
