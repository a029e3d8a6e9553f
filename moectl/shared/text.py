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
    opened: MoeModel,
    spec: str,
    *,
    length: int,
    num_tokens: int,
    seed: int,
    at_most: int | None = None,
) -> Data:
    """Read all documents of the text that the user named as sequences of at most `length` tokens.

    Ends after `num_tokens` tokens or `at_most` sequences; the data say so where the text ends
    before. Raises BadInput for no tokenizer or no text.
    """
    tokenizer = tokenizer_of(opened)
    cuts = token_sequences(
        documents(spec, seed=seed), tokenizer, length=length, num_tokens=num_tokens
    )
    sequences = list(islice(cuts, at_most))
    num_read = sum(map(len, sequences))
    shortfall = ""
    # a single token left over makes no sequence
    if num_tokens - num_read > 1 and len(sequences) != at_most:
        asked = f"{at_most:,} sequences" if at_most else f"{num_tokens:,} tokens"
        read = f"{len(sequences):,}" if at_most else f"{num_read:,}"
        shortfall = f"{read} of the {asked} that were asked for: {spec} has no more"
    return Data(spec, sequences, seed, shortfall)


def read_text(opened: MoeModel, spec: str, *, length: int, num_tokens: int, seed: int) -> BenchText:
    """Read documents of at least `length` tokens as `text_of` cuts them, half prompt and half
    decoded.

    Raises BadInput for no tokenizer or no document that long.
    """
    tokenizer = tokenizer_of(opened)
    return text_of(documents(spec, seed=seed), tokenizer, length=length, num_tokens=num_tokens)
