"""One request that shares no pass: each of its passes is as transformers' generate() runs it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from runtime.drafters.base import Drafter, DraftPasses
from runtime.session.generation.logprobs import Logprobs
from runtime.session.generation.sampling import Sampler


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token that was drawn, with its log probabilities if the request asks for them."""

    token_id: int
    logprobs: Logprobs | None = None


@dataclass(slots=True, eq=False)
class RequestDrafts:
    """The drafter of a request and the tokens that it may read; `passes` are those that it may run,
    `most` is the most drafts of a pass. `wide` are logits [1, V] of a tie, which a pass without
    drafts is to settle."""

    sampler: Sampler
    drafter: Drafter
    passes: DraftPasses
    most: int
    tokens: list[int]
    wide: torch.Tensor | None = None

    def propose(self, most: int) -> list[int]:
        """Return at most `most` drafts behind all tokens so far."""
        sampler = self.sampler
        most = min(most, self.most, sampler.num_left - 1)
        if most < 1 or self.wide is not None:
            return []
        self.tokens += sampler.tokens[0, len(self.tokens) :].tolist()
        drafts = [*self.drafter.propose(self.tokens, most)][:most]
        self.passes.rollback()
        return drafts


@dataclass(slots=True, eq=False)
class Generation:
    """A request with keys and values of its own, whose first `num_read` tokens are in them: a
    session steps it until `is_over`, or `close` frees them earlier."""

    request: int
    sampler: Sampler
    num_read: int = 0
    drafts: RequestDrafts | None = None
    output: ModelOutput | None = None  # of the last pass of one token, for a drafter

    @property
    def is_over(self) -> bool:
        return self.sampler.is_over

    def next_inputs(self, model: PreTrainedModel, drafts: Sequence[int] = ()) -> dict[str, object]:
        """Return the inputs of the pass that reads the tokens which were not read yet, and `drafts`
        behind them."""
        ids = self.sampler.tokens
        inputs = self.sampler.inputs
        if drafts:
            ids = torch.cat([ids, ids.new_tensor([drafts])], dim=1)
            inputs = model._update_model_kwargs_for_generation(
                {}, dict(inputs), num_new_tokens=len(drafts)
            )
        prepared = model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=ids.shape[1] - self.num_read,
            is_first_iteration=not self.num_read,
            **inputs,
        )
        if drafts and "logits_to_keep" in prepared:  # some families ask for the last row alone
            prepared["logits_to_keep"] = len(drafts) + 1
        return prepared

    def move_on(
        self, model: PreTrainedModel, output: ModelOutput, num_read: int, num_new: int = 1
    ) -> None:
        """Count `num_read` more tokens as read by a pass with this output, which gives `num_new`
        ones."""
        self.num_read += num_read
        inputs = self.sampler.inputs
        inputs.update(
            model._update_model_kwargs_for_generation(output, inputs, num_new_tokens=num_new)
        )

    def close(self) -> None:
        """End the generation, and free its keys and values."""
        self.sampler.is_over = True
        self.sampler.inputs.clear()
        self.output = None
        if self.drafts:
            self.drafts.drafter.close()
            self.drafts = None
