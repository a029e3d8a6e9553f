"""Options for drawing tokens, and the samplers of requests: each draws by its own options and seed,
as transformers' generate() would."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    InfNanRemoveLogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from artifacts.errors import BadInput, BadUsage
from runtime.devices import is_host
from runtime.session.generation.finite import NotFinite
from runtime.session.generation.grammar.grammars import Grammar, GrammarRule, NoToken, ThoughtsRule
from runtime.session.generation.grammar.thoughts import Thoughts
from runtime.session.generation.logprobs import Logprobs
from runtime.session.generation.penalties import Penalties

# bounds of divisors of logits: with larger or smaller ones logits are no longer finite
_LEAST = 1e-4
_MOST = 1e4
_MOST_BIAS = 100.0  # which decides alone
_NO_END = {"stop_strings": None, "exponential_decay_length_penalty": None}  # other ends of a text
_NO_PROBABILITY = "probability tensor contains either"  # as torch.multinomial begins
_NO_TOKEN = (
    "the options of the request and of the model's generation_config.json leave no token to draw"
)
_BY_SCORE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
_COUNTED = (MaxLengthCriteria, EosTokenCriteria)  # which need no tensors


class TooLong(BadInput):
    """A prompt that has no room in the model's positions, with the tokens that are to follow it."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options for drawing the next token; `temperature` 0 takes the most probable one. Without a
    `repetition_penalty`, the one of the model's generation_config.json holds. Presence and
    frequency penalties count generated tokens only; `logit_bias` has token ids with what is added
    to their logits. With `num_logprobs`, each token has its log probability and those of as many
    others. The text is one of `grammar`, after `thoughts` if there are any. Raises BadUsage for a
    value out of range."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float | None = None
    seed: int = 0
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    grammar: Grammar | None = None
    thoughts: Thoughts | None = None

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
        self._check_logits()

    def _check_logits(self) -> None:
        """Raise BadUsage where what is done to logits is out of range."""
        if not (0 <= self.min_p <= 1 and (self.num_logprobs or 0) >= 0):
            raise BadUsage("sampling needs 0 <= min-p <= 1 and num-logprobs >= 0")
        added = (self.presence_penalty, self.frequency_penalty, *dict(self.logit_bias).values())
        if not all(abs(value) <= _MOST_BIAS for value in added):
            raise BadUsage(
                f"penalties and biases must be between {-_MOST_BIAS:g} and {_MOST_BIAS:g}"
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
        options |= {"min_p": self.min_p} if self.min_p else {}
        return options | {
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }


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


def check_biases(model: PreTrainedModel, sampling: Sampling) -> None:
    """Raise BadInput where a bias is for a token outside the model's vocabulary."""
    vocabulary = model.get_input_embeddings().num_embeddings
    for token, _ in sampling.logit_bias:
        if not 0 <= token < vocabulary:
            raise BadInput(f"logit_bias has token {token}, the vocabulary 0 to {vocabulary - 1}")


class Sampler:
    """The tokens of one request so far, the rules for its next one, and whether it is over;
    `logprobs` are the newest token's, if it asks for them."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: torch.Tensor,
        sampling: Sampling,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        rule: GrammarRule | ThoughtsRule | None = None,
    ) -> None:
        """`prompt` [1, S] int64, `rule` that of the sampling's grammar. Raises BadInput for a
        prompt that the model cannot take."""
        check_prompt(model, prompt, sampling.max_new_tokens)
        check_biases(model, sampling)
        self.is_over = False
        self.num_logprobs = sampling.num_logprobs
        self.logprobs: Logprobs | None = None
        self._rule = rule
        own = _own_processors(sampling, prompt.shape[1], rule)
        self._processors, criteria, self.inputs = _rules(model, prompt, sampling, tokenizer, own)
        at = next((i for i, one in enumerate(self._processors) if one is rule), 0)
        # what follows the rule takes scores of some tokens as those of all
        self._gathers = all(isinstance(one, _BY_SCORE) for one in self._processors[at + 1 :])
        # which the checkpoint asks to be replaced by finite numbers
        self.takes_any = any(isinstance(p, InfNanRemoveLogitsProcessor) for p in self._processors)
        self._others = StoppingCriteriaList(one for one in criteria if type(one) not in _COUNTED)
        self._ends = {
            int(end)
            for one in criteria
            if type(one) is EosTokenCriteria
            for end in one.eos_token_id
        }
        self._longest = min(one.max_length for one in criteria if type(one) is MaxLengthCriteria)
        self._generator: torch.Generator | None = None
        if sampling.temperature:
            self._generator = torch.Generator(model.device).manual_seed(sampling.seed)
        self._ids = prompt.new_zeros((1, self._longest))
        self._ids[:, : prompt.shape[1]] = prompt
        self.length = prompt.shape[1]

    def takes(self, highest: int) -> bool:
        """Return whether the next token is the one with the highest logit, whatever the others
        have."""
        if self._generator is not None or len(self._processors) > (self._rule is not None):
            return False
        return self._rule is None or self._rule.allows(highest)

    @property
    def is_complete(self) -> bool:
        """True if the answer is a text of its grammar that nothing may follow."""
        return self._rule is not None and self._rule.is_complete

    @property
    def tokens(self) -> torch.Tensor:
        """The prompt and the tokens that were drawn after it [1, S]."""
        return self._ids[:, : self.length]

    @property
    def last_token(self) -> int:
        """The newest token, which the next pass is given."""
        return int(self._ids[0, self.length - 1])

    def choose(self, logits: torch.Tensor) -> int:
        """Return the next token by logits [1, V] float32. Raises NoToken where the options leave
        none."""
        ids = None  # of the scores, where these are not of the whole vocabulary
        scores = logits
        # one by one: the list as a whole inspects the signature of each
        for processor in self._processors:
            if processor is self._rule and self._gathers:
                ids = processor.few(scores.shape[-1])
            if processor is not self._rule or ids is None:
                scores = processor(self.tokens, scores)
            else:
                scores = scores[:, ids.to(scores.device)]
        place = self._drawn(scores)
        return place if ids is None else int(ids[place])

    def _drawn(self, scores: torch.Tensor) -> int:
        """Return the place that is drawn by scores [1, N]."""
        if self._generator is None:
            place = highest(scores)[1][0]
            if self._rule and not scores[0, place] > -float("inf"):
                raise NoToken(_NO_TOKEN)
            return place
        try:
            return int(
                torch.multinomial(scores.softmax(dim=-1), num_samples=1, generator=self._generator)
            )
        except RuntimeError as error:
            if _NO_PROBABILITY not in str(error):
                raise
            raise NoToken(_NO_TOKEN) from None

    @property
    def num_left(self) -> int:
        """The most tokens that may follow."""
        return self._longest - self.length

    @property
    def is_greedy(self) -> bool:
        """True if no token is drawn by chance."""
        return self._generator is None

    def gap(self, logits: torch.Tensor) -> float:
        """Return by how much the score of the token that logits [1, V] give, not drawn by chance,
        exceeds the next one."""
        scores = logits.clone()
        for processor in self._processors:
            scores = processor(self.tokens, scores)
        first, second = scores[0].topk(2).values.tolist()
        return first - second

    def append(self, token: int, logits: torch.Tensor) -> None:
        """Note the token that was chosen by logits [1, V]."""
        self._ids[0, self.length] = token
        self.length += 1
        self.is_over = token in self._ends or self.length >= self._longest
        if self._rule:
            self._rule.note(token)
            self.is_over |= self.is_complete
        if self._others and not self.is_over:
            self.is_over = bool(self._others(self.tokens, logits).all())


@torch.inference_mode()  # in which the logits were made: some are changed in place
def draw(samplers: Sequence[Sampler], logits: torch.Tensor) -> list[int | Exception]:
    """Draw the next token of each request by logits [R, V], and note it with the request. Returns
    the error in its place where a request's options leave no token or its rules fail."""
    dtype = logits.dtype
    logits = logits.float()
    values, tokens = highest(logits)
    return [
        _next(one, logits[row : row + 1], highest=tokens[row], value=values[row], dtype=dtype)
        for row, one in enumerate(samplers)
    ]


def highest(scores: torch.Tensor) -> tuple[list[float], list[int]]:
    """Return the highest of each row of scores [R, V], NaN where there is one, and its place."""
    if is_host(scores.device):  # where numpy takes a twentieth of torch's time
        places = scores.numpy().argmax(axis=-1)
        return scores.numpy()[np.arange(len(places)), places].tolist(), places.tolist()
    found = scores.max(dim=-1)
    return found.values.tolist(), found.indices.tolist()


def _next(
    sampler: Sampler, logits: torch.Tensor, *, highest: int, value: float, dtype: torch.dtype
) -> int | Exception:
    try:
        if not (value < float("inf") or sampler.takes_any):
            raise NotFinite(sampler.tokens, dtype)
        asked = sampler.num_logprobs
        raw = None if asked is None else logits.log_softmax(dim=-1)
        token = highest if sampler.takes(highest) else sampler.choose(logits)
        if raw is not None:
            sampler.logprobs = Logprobs.of(raw, token, asked)
        sampler.append(token, logits)
    except Exception as error:  # which ends this request alone
        sampler.is_over = True
        return error
    return token


def _own_processors(
    sampling: Sampling, num_prompt_tokens: int, rule: GrammarRule | ThoughtsRule | None
) -> LogitsProcessorList:
    """Return the processors that generate() has none of, each only if it has something to do."""
    own = LogitsProcessorList()
    penalties = {"presence": sampling.presence_penalty, "frequency": sampling.frequency_penalty}
    if sampling.logit_bias or any(penalties.values()):
        own.append(Penalties(sampling.logit_bias, num_prompt_tokens=num_prompt_tokens, **penalties))
    if rule:
        own.append(rule)
    return own


def _rules(
    model: PreTrainedModel,
    prompt: torch.Tensor,
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase | None,
    own: LogitsProcessorList,
) -> tuple[LogitsProcessorList, StoppingCriteriaList, dict[str, object]]:
    """Return the logits processors, `own` among them, the stopping criteria and the inputs of the
    first pass, empty keys and values among them, as generate() prepares them for this prompt by
    options and by the model's generation settings."""
    prepared = []

    def take(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **inputs: object,
    ) -> torch.Tensor:
        prepared.append((logits_processor, stopping_criteria, inputs))
        return input_ids

    # generate() takes no tokenizer, which these need, beside a `custom_generate`
    options = {"stop_strings": model.generation_config.stop_strings} | sampling.options()
    stops = options.pop("stop_strings")
    criteria = [StopStringCriteria(tokenizer, stops)] if stops else []
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        custom_generate=take,
        stopping_criteria=StoppingCriteriaList(criteria),
        logits_processor=own,
        stop_strings=None,
        **options,
    )
    return prepared[0]
