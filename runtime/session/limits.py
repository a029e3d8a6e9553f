"""What a model can take: tokens of its vocabulary, sequences within its positions."""

from transformers import PreTrainedModel

from artifacts.errors import BadInput


def check_tokens(model: PreTrainedModel, *, highest: int, length: int, what: str) -> None:
    """Raise BadInput if token `highest`, or a sequence of `length` tokens, called `what`, is beyond the model."""
    vocabulary = model.get_input_embeddings().num_embeddings
    if highest >= vocabulary:
        raise BadInput(f"token {highest} is outside the vocabulary of {vocabulary}: the tokenizer is another model's")
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest and length > longest:
        raise BadInput(f"{what} exceed the model's {longest} positions: give fewer")
