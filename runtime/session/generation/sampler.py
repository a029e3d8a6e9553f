"""The next tokens of several requests: each by its own options and seed, as transformers'
generate() would draw it."""

from collections.abc import Sequence

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    InfNanRemoveLogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from artifacts.errors import BadInput
from runtime.session.generation.finite import NotFinite
from runtime.session.generation.sampling import Sampling, check_prompt

_NO_PROBABILITY = "probability tensor contains either"  # as torch.multinomial begins


class NextToken:
    """The tokens of one request so far, the rules for its next one, and whether it is over."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: torch.Tensor,
        sampling: Sampling,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """`prompt` [1, S] int64. Raises BadInput for one that the model cannot take."""
        check_prompt(model, prompt, sampling.max_new_tokens)
        self.is_over = False
        self._processors, criteria, self.inputs = _rules(model, prompt, sampling, tokenizer)
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

    @property
    def takes_highest(self) -> bool:
        """True if the next token is the one with the highest logit, whatever came before."""
        return not self._processors and self._generator is None

    @property
    def tokens(self) -> torch.Tensor:
        """The prompt and the tokens that were drawn after it [1, S]."""
        return self._ids[:, : self.length]

    @property
    def last_token(self) -> int:
        """The newest token, which the next pass is given."""
        return int(self._ids[0, self.length - 1])

    def choose(self, logits: torch.Tensor) -> int:
        """Return the next token by logits [1, V] float32. Raises BadInput where the options leave
        none."""
        scores = logits
        # one by one: the list as a whole inspects the signature of each
        for processor in self._processors:
            scores = processor(self.tokens, scores)
        if self._generator is None:
            return int(scores.argmax(dim=-1))
        try:
            return int(
                torch.multinomial(scores.softmax(dim=-1), num_samples=1, generator=self._generator)
            )
        except RuntimeError as error:
            if _NO_PROBABILITY not in str(error):
                raise
            raise BadInput(
                "the options of the request and of the model's generation_config.json leave no "
                "token to draw"
            ) from None

    def append(self, token: int, logits: torch.Tensor) -> None:
        """Note the token that was chosen by logits [1, V]."""
        self._ids[0, self.length] = token
        self.length += 1
        self.is_over = token in self._ends or self.length >= self._longest
        if self._others and not self.is_over:
            self.is_over = bool(self._others(self.tokens, logits).all())


_COUNTED = (MaxLengthCriteria, EosTokenCriteria)  # which need no tensors


def draw(next_tokens: Sequence[NextToken], logits: torch.Tensor) -> list[int | Exception]:
    """Draw the next token of each request by logits [R, V], and note it with the request. Returns
    the error in its place where a request's options leave no token or its rules fail."""
    dtype = logits.dtype
    logits = logits.float()
    highest = logits.max(dim=-1)
    values = highest.values.tolist()
    tokens = highest.indices.tolist()
    return [
        _next(one, logits[row : row + 1], highest=tokens[row], value=values[row], dtype=dtype)
        for row, one in enumerate(next_tokens)
    ]


def _next(
    next_token: NextToken, logits: torch.Tensor, *, highest: int, value: float, dtype: torch.dtype
) -> int | Exception:
    try:
        if not (value < float("inf") or next_token.takes_any):
            raise NotFinite(next_token.tokens, dtype)
        token = highest if next_token.takes_highest else next_token.choose(logits)
        next_token.append(token, logits)
    except Exception as error:  # which ends this request alone
        next_token.is_over = True
        return error
    return token


def _rules(
    model: PreTrainedModel,
    prompt: torch.Tensor,
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[LogitsProcessorList, StoppingCriteriaList, dict[str, object]]:
    """Return the logits processors, the stopping criteria and the inputs of the first pass, empty
    keys and values among them, as generate() prepares them for this prompt by options and by the
    model's generation settings."""
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
        stop_strings=None,
        **options,
    )
    return prepared[0]
