"""One request that shares no pass: each of its passes is as transformers' generate() runs it."""

from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from runtime.session.generation.sampling import Sampler


@dataclass(slots=True, eq=False)
class Generation:
    """A request with keys and values of its own, whose first `num_read` tokens are in them: a
    session steps it until `is_over`, or `close` frees them earlier."""

    request: int
    sampler: Sampler
    num_read: int = 0

    @property
    def is_over(self) -> bool:
        return self.sampler.is_over

    def next_inputs(self, model: PreTrainedModel) -> dict[str, object]:
        """Return the inputs of the pass that reads the tokens which were not read yet."""
        ids = self.sampler.tokens
        return model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=ids.shape[1] - self.num_read,
            is_first_iteration=not self.num_read,
            **self.sampler.inputs,
        )

    def move_on(self, model: PreTrainedModel, output: ModelOutput) -> None:
        """Count all tokens as read, by a pass with this output."""
        self.num_read = self.sampler.length
        inputs = self.sampler.inputs
        inputs.update(model._update_model_kwargs_for_generation(output, inputs))

    def close(self) -> None:
        """End the generation, and free its keys and values."""
        self.sampler.is_over = True
        self.sampler.inputs.clear()
