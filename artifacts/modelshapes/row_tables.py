"""Embedding tables besides that of the tokens, by a config or by a name in GGUF files: they stay in
a model's files, where a pass reads the rows of its tokens."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from artifacts.modelshapes.attention import Matrix
from artifacts.modelshapes.fields import Fields

IN_GGUF = "per_layer_token_embd.weight"
"""The name of such a table in GGUF files, whatever the architecture."""

_USUAL = {"ngram_size": 3, "heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000}
"""Fields of Qwen4-Exp that its config may lack."""


def row_tables(config: Mapping, path: Path) -> Iterator[Matrix]:
    """Yield each table of the text model with the config at `path`: Gemma 4's embeddings of all
    layers, and Qwen4-Exp's of n-grams. Raises BadInput.

    A head of n-grams has as many rows as the next prime after `ngram_vocab_size_base`. It is
    counted with that base, which is a few rows less.
    """
    fields = Fields(_USUAL | config, path)
    if width := fields.get("hidden_size_per_layer_input"):
        layers, rows = fields.counts("num_hidden_layers", "vocab_size_per_layer_input")
        yield "embed_tokens_per_layer", rows, layers * width
    layers = config.get("ple_layer_ids")
    for layer in layers if isinstance(layers, list) else ():
        ngram, of_each, rows = fields.counts(*_USUAL)
        heads = (ngram - 1) * of_each
        width = fields.get("ple_embed_dim") or fields.count("hidden_size")
        layer = Fields({"ple_layer_ids": layer}, path).count("ple_layer_ids") - 1
        name = f"layers.{layer}.ple.ple_embedding.ngram_embedding"
        yield name, heads * rows, width // max(1, heads)
