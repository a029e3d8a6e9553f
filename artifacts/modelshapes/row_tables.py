"""Embedding tables besides that of the tokens, by a config or by a name in GGUF files: they stay in
a model's files, where a pass reads the rows of its tokens."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from artifacts.modelshapes.attention import Matrix, needed

IN_GGUF = "per_layer_token_embd.weight"
"""The name of such a table in GGUF files, whatever the architecture."""

_USUAL = {"ngram_size": 3, "heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000}
"""Fields of Qwen4-Exp that its config may lack."""


def row_tables(config: Mapping, path: Path) -> Iterator[Matrix]:
    """Yield each table of the text model with the config at `path`: Gemma 4's embeddings of all
    layers, and Qwen4-Exp's of n-grams. Raises BadInput.

    A head of n-grams has the number of rows that follows `ngram_vocab_size_base` among the primes;
    what lies between is not counted.
    """
    if config.get("hidden_size_per_layer_input"):
        width = needed(config, path, "hidden_size_per_layer_input")
        layers = needed(config, path, "num_hidden_layers")
        rows = needed(config, path, "vocab_size_per_layer_input")
        yield "embed_tokens_per_layer", rows, layers * width
    layers = config.get("ple_layer_ids")
    for layer in layers if isinstance(layers, list) else ():
        ngram, of_each, rows = (needed(_USUAL | config, path, name) for name in _USUAL)
        heads = (ngram - 1) * of_each
        width = "ple_embed_dim" if config.get("ple_embed_dim") else "hidden_size"
        columns = needed(config, path, width) // max(1, heads)
        layer = needed({"ple_layer_ids": layer}, path, "ple_layer_ids") - 1
        yield f"layers.{layer}.ple.ple_embedding.ngram_embedding", heads * rows, columns
