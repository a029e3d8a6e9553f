"""A user's text as the tokens of a model."""

from itertools import islice

from transformers import PreTrainedTokenizerBase

from artifacts.errors import BadInput
from profilers.compare.bench import BenchText, text_of
from profilers.text.batches import Data
from profilers.text.corpus import documents, token_sequences
from runtime.model.open import MoeModel


def tokenizer_of(opened: MoeModel) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer. Raises BadInput when the checkpoint has none."""
    if opened.tokenizer is None:
        raise BadInput("the checkpoint has no tokenizer: put tokenizer.json beside it")
    return opened.tokenizer


def read_data(
    opened: MoeModel, spec: str, *, length: int, num_tokens: int, seed: int, at_most: int | None = None
) -> Data:
    """Read all documents of the text that the user named as sequences of at most `length` tokens.

    Ends after `num_tokens` tokens or `at_most` sequences. Raises BadInput for no tokenizer or no text.
    """
    tokenizer = tokenizer_of(opened)
    sequences = token_sequences(documents(spec, seed=seed), tokenizer, length=length, num_tokens=num_tokens)
    return Data(spec, list(islice(sequences, at_most)), seed)


def read_text(opened: MoeModel, spec: str, *, length: int, num_tokens: int, seed: int) -> BenchText:
    """Read the beginnings of documents of at least `length` tokens, half prompt and half decoded.

    Raises BadInput for no tokenizer or no document that long.
    """
    tokenizer = tokenizer_of(opened)
    return text_of(documents(spec, seed=seed), tokenizer, length=length, num_tokens=num_tokens)
