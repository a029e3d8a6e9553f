"""Options for drawing tokens, their times, and the prompts that a model can take."""

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from artifacts.errors import BadInput, BadUsage

# bounds of divisors of logits: with larger or smaller ones logits are no longer finite
_LEAST = 1e-4
_MOST = 1e4
_NO_END = {"stop_strings": None, "exponential_decay_length_penalty": None}  # other ends of a text


class TooLong(BadInput):
    """A prompt that has no room in the model's positions, with the tokens that are to follow it."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options for drawing the next token; `temperature` 0 takes the most probable one. Without a
    `repetition_penalty`, the one of the model's generation_config.json holds. Raises BadUsage for a
    value out of range."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float | None = None
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise BadUsage(f"max-new-tokens must be at least 1, not {self.max_new_tokens}")
        is_sound = 0 < self.top_p <= 1 and self.top_k >= 0
        is_sound &= self.temperature == 0 or _LEAST <= self.temperature <= _MOST
        if not (
            is_sound
            and (self.repetition_penalty is None or _LEAST <= self.repetition_penalty <= _MOST)
        ):
            raise BadUsage(
                "sampling needs temperature >= 0, 0 < top-p <= 1, top-k >= 0 and "
                f"repetition-penalty > 0, neither beyond {_LEAST:g} and {_MOST:g}"
            )

    def options(self) -> dict[str, object]:
        """Return the keyword arguments of generate(), which take precedence over the model's
        generation settings."""
        options: dict[str, object] = {"max_new_tokens": self.max_new_tokens}
        if self.repetition_penalty is not None:
            options["repetition_penalty"] = float(self.repetition_penalty)
        if self.ignore_eos:
            options |= {"min_new_tokens": self.max_new_tokens} | _NO_END
        if not self.temperature:
            return options | {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        return options | {
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; `index` counts from 0, `seconds` from the call that gave the prompt,
    without the time that the reader of the tokens took."""

    token_id: int
    index: int
    seconds: float


@dataclass(slots=True)
class TokenTiming:
    """Time to first token and mean time per token after it, in milliseconds."""

    seconds: list[float] = field(default_factory=list)  # of each token, since the prompt was given

    @property
    def ttft_ms(self) -> float:
        return self.seconds[0] * 1e3 if self.seconds else 0.0

    @property
    def tpot_ms(self) -> float:
        later = len(self.seconds) - 1
        return (self.seconds[-1] - self.seconds[0]) * 1e3 / later if later > 0 else 0.0


def check_prompt(model: PreTrainedModel, prompt: torch.Tensor, num_new: int) -> None:
    """Raise BadInput for a prompt [1, S] that is empty or of unknown tokens, TooLong where
    `num_new` tokens after it have no room."""
    if prompt.numel() == 0:
        raise BadInput("the prompt is empty: give at least one token of text")
    what = f"{prompt.shape[1]} prompt tokens and {num_new} new ones"
    check_tokens(model, highest=int(prompt.max()), length=prompt.shape[1] + num_new, what=what)


def check_tokens(model: PreTrainedModel, *, highest: int, length: int, what: str) -> None:
    """Raise BadInput if token id `highest` is outside the model's vocabulary, TooLong if `length`
    tokens, which the error calls `what`, are more than its positions."""
    vocabulary = model.get_input_embeddings().num_embeddings
    if highest >= vocabulary:
        raise BadInput(
            f"token {highest} is outside the vocabulary of {vocabulary}: the tokenizer is another "
            "model's"
        )
    longest = num_positions(model)
    if longest and length > longest:
        raise TooLong(f"{what} exceed the model's {longest} positions: give fewer")


def num_positions(model: PreTrainedModel) -> int | None:
    """Return the largest number of tokens that a prompt and its answer may have together, None
    where the model's configuration names no limit."""
    return getattr(model.config, "max_position_embeddings", None)
