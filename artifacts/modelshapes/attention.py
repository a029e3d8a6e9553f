"""The attention of a model's layers, by name or from a config.json: its heads, matrices and
weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from artifacts.modelshapes.fields import Fields

Matrix = tuple[str, int, int]
"""The name of a module without the prefix of its model, and the rows and columns of its weight."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): the cache holds the compressed key and value, and
    the rotary key."""

    kv_rank: int
    rope: int
    nope: int
    value: int
    q_rank: int | None

    def matrices(self, heads: int, hidden: int) -> Iterator[Matrix]:
        """Yield the name, rows and columns of each matrix."""
        query = heads * (self.nope + self.rope)
        if self.q_rank is None:
            yield "q_proj", query, hidden
        else:
            yield "q_a_proj", self.q_rank, hidden
            yield "q_b_proj", query, self.q_rank
        yield "kv_a_proj_with_mqa", self.kv_rank + self.rope, hidden
        yield "kv_b_proj", heads * (self.nope + self.value), self.kv_rank
        yield "o_proj", hidden, heads * self.value


@dataclass(frozen=True, slots=True)
class Attention:
    """`heads` of queries, which share `kv_heads` of keys and values (grouped queries), of
    `head_dim` numbers each. `is_gated`: the output passes a gate of its own matrix. `indexer` has
    the matrices that choose which tokens are read, if some do, and `index_width` numbers of theirs
    are cached for a token."""

    heads: int
    kv_heads: int
    head_dim: int
    latent: Latent | None = None
    is_gated: bool = False
    has_values: bool = True  # or keys are the values
    indexer: tuple[Matrix, ...] = ()
    index_width: int = 0

    @property
    def cache_width(self) -> int:
        """Numbers that the cache holds for one token."""
        latent = self.latent
        width = latent.kv_rank + latent.rope if latent else 2 * self.kv_heads * self.head_dim
        return width + self.index_width

    def num_weights(self, hidden: int) -> int:
        """Weights of all matrices at a hidden size."""
        return sum(rows * columns for _, rows, columns in self.matrices(hidden))

    def matrices(self, hidden: int) -> Iterator[Matrix]:
        """Yield the name, rows and columns of each matrix."""
        latent = self.latent
        heads = self.heads
        yield from self.indexer
        if self.is_gated:
            yield "gate_proj", heads * (latent.value if latent else self.head_dim), hidden
        if latent:
            yield from latent.matrices(heads, hidden)
            return
        keys = self.kv_heads * self.head_dim
        yield "q_proj", heads * self.head_dim, hidden
        yield "k_proj", keys, hidden
        yield "v_proj", keys if self.has_values else 0, hidden
        yield "o_proj", hidden, heads * self.head_dim


_DEEPSEEK = Latent(512, 64, 128, 128, 1536)
_QWEN3_235B = Attention(64, 4, 128)
ATTENTIONS = {
    "mixtral-8x7b": Attention(32, 8, 128),
    "mixtral-8x22b": Attention(48, 8, 128),
    "olmoe-1b-7b": Attention(16, 16, 128),
    "qwen1.5-moe-a2.7b": Attention(16, 16, 128),
    "qwen2-57b-a14b": Attention(28, 4, 128),
    "deepseek-v2-lite": Attention(16, 16, 128, Latent(512, 64, 128, 128, None)),
    "deepseek-v2": Attention(128, 128, 128, _DEEPSEEK),
    "deepseek-v3": Attention(128, 128, 128, _DEEPSEEK),
    "qwen3-30b-a3b": Attention(32, 4, 128),
    "qwen3-235b-a22b": _QWEN3_235B,
    "qwen3-235b-a22b-fp8": _QWEN3_235B,
    "qwen3-235b-a22b-gptq-int4": _QWEN3_235B,
    "phi-3.5-moe": Attention(32, 8, 128),
    "gpt-oss-20b": Attention(64, 8, 64),
    "gpt-oss-120b": Attention(64, 8, 64),
}
"""Attention of published models by name."""


def attention_of(config: Mapping, path: Path) -> Attention:
    """Read the attention from the fields of the config at `path`. Raises BadInput."""
    fields = Fields(config, path)
    heads = fields.count("num_attention_heads")
    latent = None
    if rank := fields.get("kv_lora_rank"):
        nope, value = fields.counts("qk_nope_head_dim", "v_head_dim")
        rope = fields.get("qk_rope_head_dim")
        latent = Latent(rank, rope, nope, value, fields.get("q_lora_rank") or None)
    return Attention(
        heads,
        fields.get("num_key_value_heads") or heads,
        fields.get("head_dim") or fields.count("hidden_size") // heads,
        latent,
    )
