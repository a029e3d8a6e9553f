"""What a GGUF header says of the attention cache, layer by layer, and of layers that draft."""

import pytest

from artifacts.formats.gguf.gguf_header import TYPES, GgufTensor
from runtime.model.gguf.shape import _cached, num_layers

LATENT = {"attention.kv_lora_rank": 512, "rope.dimension_count": 64}


def keys_and_values(widths: dict[int, int]) -> dict[str, int]:
    return {
        f"blk.{layer}.attn_{name}.weight": width
        for layer, width in widths.items()
        for name in ("k", "v")
    }


@pytest.mark.parametrize(
    ("own", "rows", "layers", "width"),
    [
        ({"block_count": 4}, keys_and_values(dict.fromkeys(range(4), 2 * 512)), 4, 4 * 2 * 2 * 512),
        (
            {
                "block_count": 49,
                "nextn_predict_layers": 1,
                "attention.compress_ratios": [0, 0, 0, 4] * 12,
            },
            keys_and_values(dict.fromkeys(range(3, 48, 4), 2 * 512)),
            *(48, 12 * 2 * 2 * 512),
        ),
        (
            {"block_count": 6},
            keys_and_values(dict.fromkeys(range(5), 8 * 256) | {5: 2 * 512}),
            *(6, 2 * (5 * 8 * 256 + 2 * 512)),
        ),
        (
            {"block_count": 3, "attention.compress_ratios": [0, 4, 128]},
            {f"blk.{layer}.attn_compressor_norm.weight": 512 for layer in (1, 2)},
            *(3, 512 / 4 + 512 / 128),
        ),
        ({"block_count": 4, "attention.head_count_kv": [0, 0, 0, 16]} | LATENT, {}, 4, 576),
        ({"block_count": 2} | LATENT, {}, 2, 2 * 576),
    ],
)
def test_only_layers_with_a_cache_count(
    own: dict, rows: dict[str, int], layers: int, width: float
) -> None:
    assert num_layers(own) == layers
    tensors = [GgufTensor(name, (count, 32), TYPES["F32"], 0) for name, count in rows.items()]
    assert _cached(tensors, own) == width
